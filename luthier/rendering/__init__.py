"""Conversations become pieces: the model's own chat template, run with strings that know where they came from.

Read in this order: references, guards, trace, questioned, tracked, json_text, codegen, environment, messages, template,
control, shape, recordings, turns, pieces, paths, blueprint, target_rules, targets, render.
"""
