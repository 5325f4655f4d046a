"""What a set of results says: the console, tables. Reads results; starts and computes nothing."""
