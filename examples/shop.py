"""The tool of examples/tools.yaml. Any function will do whose arguments have names: the model sees its signature and
docstring. It runs in a process of its own."""

from luthier.presets import skills


def look_up(column: str, item: str) -> str:
    """What the book of the shop says."""
    return skills.look_up(column, item)
