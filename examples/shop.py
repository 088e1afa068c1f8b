"""The tool of examples/tools.yaml. Any function will do whose arguments have names: the model sees its signature and
docstring. It runs in a process of its own."""

from zlib import crc32

COLUMNS = ("price", "stock")
ITEMS = (
    "lamp", "chair", "table", "spoon", "knife", "mirror", "pillow", "bottle", "candle", "hat", "glove", "ring", "drum",
    "flute", "violin", "rope", "ladder", "wheel", "kite", "nail", "umbrella", "axe", "oven", "jug",
)  # fmt: skip


def look_up(column: str, item: str) -> str:
    """What the book of the shop says."""
    if column not in COLUMNS:
        raise ValueError(f"there is no column {column!r}")
    if item not in ITEMS:
        raise ValueError(f"there is no item {item!r}")
    # The book: a digit for each, never the same in both columns of an item.
    number = crc32(f"{item} digits".encode())
    price = number % 10
    return str(price if column == "price" else (price + 1 + number // 10 % 9) % 10)
