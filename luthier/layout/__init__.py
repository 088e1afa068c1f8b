"""Integers before tensors: positions, cuts and trees as pure functions of numbers and numpy arrays."""
