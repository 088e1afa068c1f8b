"""The run description: typed, read from YAML with line numbers, every mistake found at once.

Read in this order: choices, patterns, inputs, media, objective, schema, scalars, syntax, tree, yaml_text, suggest,
reading, shorthand, overrides, synonyms, words, explain, draft, adapters, losses, sharding, conflicts, files, machine,
loading, unread, dumping, reference.
"""
