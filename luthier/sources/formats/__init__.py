"""The formats that rows come in: one table (`table.py`), one converter per kind of row."""
