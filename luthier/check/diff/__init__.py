"""What changes in rows between two run descriptions: as data, in a terminal and as a page."""
