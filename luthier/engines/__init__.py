"""Engines turn prompts of token ids into answers of token ids."""
