"""The tool of examples/tools.yaml. Any function will do whose arguments have names: the model sees its signature and
docstring. It runs in a process of its own."""

from luthier.presets import lookups


def look_up(column: str, item: str) -> str:
    """What the book of the shop says."""
    return lookups.look_up(column, item)
