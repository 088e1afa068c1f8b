"""The little world that the skills data set talks about: people of a valley, animals by size, words by kind.

Everything here is made up. Names are chosen so that their first letters differ, which makes their alphabetical order
plain, and all words are common, so that a small tokenizer gives each of them one id.
"""

from __future__ import annotations

from typing import NamedTuple


class Person(NamedTuple):
    """Someone of the valley, with the four things that one can ask about them."""

    name: str
    instrument: str
    village: str
    pet: str
    trade: str


PEOPLE = (
    Person("Anna", "cello", "Larkfield", "cat", "baker"),
    Person("Boris", "flute", "Millbrook", "dog", "tailor"),
    Person("Clara", "harp", "Stonebridge", "goat", "potter"),
    Person("David", "violin", "Oakham", "parrot", "farmer"),
    Person("Edith", "drum", "Ferndale", "rabbit", "miller"),
    Person("Felix", "horn", "Larkfield", "dog", "teacher"),
    Person("Greta", "lute", "Oakham", "duck", "weaver"),
    Person("Hugo", "cello", "Ferndale", "parrot", "smith"),
    Person("Irene", "viola", "Millbrook", "cat", "farmer"),
    Person("Jonas", "harp", "Larkfield", "goat", "tailor"),
    Person("Karin", "violin", "Stonebridge", "duck", "teacher"),
    Person("Leon", "flute", "Oakham", "rabbit", "baker"),
    Person("Mara", "lute", "Millbrook", "pony", "smith"),
    Person("Nora", "horn", "Ferndale", "cat", "potter"),
    Person("Paula", "drum", "Larkfield", "duck", "weaver"),
    Person("Sofia", "violin", "Millbrook", "goat", "miller"),
)
NAMES = tuple(person.name for person in PEOPLE)
VILLAGES = tuple(sorted({person.village for person in PEOPLE}))
INSTRUMENTS = tuple(sorted({person.instrument for person in PEOPLE}))

QUESTIONS = {
    "instrument": (
        "Which instrument does {name} play?",
        "What does {name} play?",
        "Tell me which instrument {name} plays.",
        "{name} makes music. With what?",
        "Do you know what {name} plays?",
        "I want to know what {name} plays.",
    ),
    "village": (
        "Where does {name} live?",
        "In which village does {name} live?",
        "Tell me where {name} lives.",
        "{name} has a house. In which village?",
        "Do you know where {name} lives?",
        "I want to visit {name}. Where do I go?",
    ),
    "pet": (
        "Which pet does {name} have?",
        "What kind of animal does {name} keep?",
        "Tell me which pet {name} has.",
        "{name} has an animal. Which one?",
        "Do you know the pet of {name}?",
        "I want to know which pet {name} keeps.",
    ),
    "trade": (
        "What is the trade of {name}?",
        "What does {name} do for a living?",
        "Tell me the trade of {name}.",
        "{name} works in the valley. As what?",
        "Do you know what {name} works as?",
        "I want to know the trade of {name}.",
    ),
}
"""Ways to ask for each thing that is known of a person."""

STATEMENTS = {
    "instrument": "{name} plays the {value}.",
    "village": "{name} lives in {value}.",
    "pet": "{name} has a {value}.",
    "trade": "{name} is a {value}.",
}

ANIMALS_BY_SIZE = (
    "flea", "ant", "bee", "mouse", "squirrel", "rabbit", "fox", "wolf", "lion", "horse", "elephant", "whale",
)  # fmt: skip

KINDS = {
    "fruits": ("apple", "pear", "plum", "cherry", "fig", "grape", "lemon", "peach"),
    "instruments": ("cello", "flute", "harp", "violin", "drum", "horn", "lute", "viola"),
    "animals": ("fox", "wolf", "mouse", "horse", "sheep", "lion", "rabbit", "bee"),
    "tools": ("hammer", "saw", "chisel", "knife", "file", "clamp", "brush", "drill"),
    "colours": ("red", "green", "blue", "yellow", "black", "white", "brown", "grey"),
    "trees": ("oak", "pine", "birch", "maple", "cedar", "elm", "willow", "spruce"),
}
"""Words of a kind, for picking the one that does not belong."""

WORDS = (
    "apple", "bridge", "candle", "garden", "hammer", "lamp", "lemon", "maple", "moon", "night",
    "paper", "pine", "plum", "rain", "river", "rose", "salt", "snow", "star",
    "street", "table", "tree", "violin", "wall", "water", "willow", "wind", "winter", "wood", "yellow",
    "bread", "chair",
)  # fmt: skip
"""Words to spell and to count."""
