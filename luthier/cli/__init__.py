"""The command ``luthier``: thin; each command parses, calls and prints.

Read in this order: output, preparing, pipeline, configuration, environment, inspection,
comparison, training, quickstart, verification, store, main.
"""
