"""Rows to stored samples: read, looked up, encoded where they are new, and counted; by one process or by many."""
