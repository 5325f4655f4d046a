"""What a run leaves behind: records, the result, metrics, tracking. Must not import a framework."""
