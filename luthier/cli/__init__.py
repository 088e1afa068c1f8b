"""The command ``luthier``: thin; each command parses, calls and prints.

Read in this order: output, pipeline, selection, configuration, environment, inspection, comparison, training,
quickstart, verification, main.
"""
