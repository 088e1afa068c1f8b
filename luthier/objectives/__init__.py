"""Scores to losses: always sums, never means; the trainer divides by the whole step's count."""
