"""Conversations become pieces: the model's own chat template, run with strings that know where they came from.

Read in this order: references, guards, trace, questioned, tracked, json_text, codegen, sandbox, environment, control,
media_slots, messages, template, framing, shape, recordings, openings, turns, pieces, paths, one_rendering,
blueprint, filled, target_rules, kinds, targets, documents, compared, render.
"""
