"""The public surface of the package as text: each name with its kind, its signature and its fields.

    python -m tests.public_surface > docs/public_surface.txt

A test compares the page with the package, so that nothing public changes unnoticed.
"""

from __future__ import annotations

import dataclasses
import inspect

import luthier


def public_surface() -> str:
    """One line a name, in alphabetical order."""
    return "".join(f"{line}\n" for name in public_names() for line in _told(name))


def public_names() -> list[str]:
    """What `dir` offers, but for what every module has."""
    return [name for name in dir(luthier) if not name.startswith("_")]


# What functions give to be handed on to others: programs neither make it nor look into it.
HANDLES = {"MediaInputs", "MediaQueue", "ModelPass", "ObjectiveParts", "SampleStore"}
_MADE_BY = {"Reading", "Tokenizer"}  # what functions make, so that their own arguments are no matter


def _told(name: str) -> list[str]:
    found = getattr(luthier, name)
    if not inspect.isclass(found):
        return [f"def {name}{inspect.signature(found)}" if inspect.isfunction(found) else f"{name} = {_plainly(found)}"]
    bases = ", ".join(base.__name__ for base in found.__bases__ if base is not object)
    head = f"class {name}({bases})" if issubclass(found, Exception) else f"class {name}"
    if name in HANDLES:
        return [head]
    if dataclasses.is_dataclass(found):
        fields = [f"{one.name}: {one.type}" for one in dataclasses.fields(found) if not one.name.startswith("_")]
        return [f"{head}: {', '.join(fields)}", *_methods(found)]
    if hasattr(found, "model_fields"):
        return [f"{head}: {', '.join(found.model_fields)}"]
    return [head, *_methods(found)]


def _plainly(found: object) -> str:
    """As Python 3.11 and 3.12 name its classes, of which 3.13 tells the private module."""
    return str(found).replace("pathlib._local.", "pathlib.")


def _methods(found: type) -> list[str]:
    told = []
    for name, member in sorted(vars(found).items()):
        if name.startswith("_") and (name != "__init__" or found.__name__ in _MADE_BY):
            continue
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if inspect.isfunction(function) and not (name == "__init__" and dataclasses.is_dataclass(found)):
            told.append(f"    {name}{_without_self(inspect.signature(function))}")
        elif isinstance(member, property) or type(member).__name__ == "cached_property":
            told.append(f"    {name}")
    return told


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    return signature.replace(parameters=parameters)


if __name__ == "__main__":
    print(public_surface(), end="")
