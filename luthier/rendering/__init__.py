"""Conversations become pieces: the model's own chat template is run with strings that know where they came from.

Read in this order: tracked, trace, codegen, environment, messages, template, control, turns, pieces, targets, render.
"""
