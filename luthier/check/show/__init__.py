"""What the model sees of a row: as data (`view`), in a terminal and as a page."""
