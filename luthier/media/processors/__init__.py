"""Transformers' processors, called as each of them must be, and what comes out as arrays."""
