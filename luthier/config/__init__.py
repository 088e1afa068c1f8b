"""The run description: typed, read from YAML with line numbers, every mistake found at once."""
