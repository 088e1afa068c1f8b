"""Trained runs written as model folders that others load, each with a proof."""
