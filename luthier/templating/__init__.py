"""Jinja as chat templates are run with: transformers' sandbox, under limits of time, steps, memory and text.

It knows nothing of conversations, so that what renders rows and what verifies them can both stand on it.
Read in this order: limits, sizes, codegen, sandbox, plain.
"""
