"""A run: stream of batches, losses and references, trainer, checkpoints, results."""
