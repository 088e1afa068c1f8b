"""Families of multimodal models: what a row is (`family`), the rows (`rows_*`), and their table."""
