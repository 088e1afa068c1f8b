"""Answers that a run draws itself: drawn, judged, laid out, and kept in its folder."""
