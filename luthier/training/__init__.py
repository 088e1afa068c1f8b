"""A run: stream of batches, losses and references, trainer, checkpoints, results."""

import logging

# torchao is imported where it is installed, and torch then warns of its enums: nothing that a user could change.
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
