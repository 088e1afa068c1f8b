"""Scores to the losses of a run: one file an objective, the models they compare with, and kernels."""
