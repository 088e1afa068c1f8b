"""Run descriptions of other tools, read as they are."""
