"""What arithmetic and small measurements say of a machine. Must not import a framework."""
