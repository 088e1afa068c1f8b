"""Conversations become pieces: the model's own chat template, run with strings that know where they came from."""
