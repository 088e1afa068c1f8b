"""What a run tells: its result, progress, journal, plots, and the report as a page and as numbers."""
