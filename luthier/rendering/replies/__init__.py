"""Replies of a model read back: what a template writes is learned (`learning`), replies are read by it (`scanner`)."""
