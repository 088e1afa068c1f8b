"""The command ``luthier``: thin; each command parses, calls and prints."""
