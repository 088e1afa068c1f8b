"""Conversations become pieces: the model's own chat template, run with strings that know where they came from.

Read in this order: references, guards, trace, questioned, tracked, value_text, codegen, allowed, environment,
control, media_slots, messages, words, places, template, framing, shape, prefixes, recordings, openings, turns, pieces,
paths, one_rendering, answers, blueprint, filled, target_rules, kinds, targets, documents, compared, render.
"""
