"""Where things stand in the rows of one source: its format, its columns' names, its tags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from luthier.config.choices import SameRole
from luthier.errors import PluginError
from luthier.records import TargetRule

FUNCTION_CALL = "function_call"  # ShareGPT's role for an assistant's message whose value is a tool call
ROLES = ("system", "user", "assistant", "tool")

# What the field's data sets call our roles. A tag of the user replaces the names of its role.
_ROLE_NAMES: Mapping[str, tuple[str, ...]] = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "model", "bot", "chatgpt", "bard", "bing"),
    "tool": ("tool", "observation", "function", "tool_response"),
    FUNCTION_CALL: (FUNCTION_CALL, "tool_call"),
}
_ROLE_TAGS = {
    "system_tag": "system",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": FUNCTION_CALL,
}
TAG_NAMES = ("role_tag", "content_tag", "train_tag", *_ROLE_TAGS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tags:
    """How a message is written: the keys of role and content, and the file's role names with our role for each.

    ``train`` is the one key that says whether a message is learned; None: all the usual ones do.
    ``thinking`` are the tags around a thought in an assistant's text; None: there are none, text is text.
    """

    role: str
    content: str
    roles: Mapping[str, str]
    train: str | None = None
    thinking: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All that converting a row needs to know of its source. Small and picklable.

    ``columns`` maps our column names to the file's; a name that is not there has no column in this source.
    ``train_on`` and ``rules`` are the source's own say on what is learned. ``media_root`` is what relative media paths
    are joined with; None: the folder of the row's file. ``rendered``: texts hold control tokens on purpose.
    ``drop_system``: system messages are left out. ``prompt_format``: patterns of the text before a plain text.
    ``text_limit``: texts of so many characters or more are refused; None: none is. ``version`` is that of a plugin's
    format; it is part of the key of each row in the store.
    """

    format: str
    columns: Mapping[str, str]
    tags: Tags
    train_on: str | None = None
    rules: tuple[TargetRule, ...] = ()
    media_root: str | None = None
    rendered: bool = False
    same_role: SameRole = SameRole.KEEP
    drop_system: bool = False
    prompt_format: tuple[str, ...] = ()
    text_limit: int | None = None
    version: str = ""


def build_tags(
    overrides: Mapping[str, str], *, role: str, content: str, thinking: tuple[str, str] | None = None
) -> Tags:
    """The default tags with the user's in their places: ``{user_tag: customer}`` changes no other role's names."""
    names = dict(_ROLE_NAMES)
    for tag, our_role in _ROLE_TAGS.items():
        if tag in overrides:
            names[our_role] = (overrides[tag],)
    replaced = {overrides[tag] for tag in _ROLE_TAGS if tag in overrides}
    roles = {name: our_role for our_role, aliases in names.items() for name in aliases if name not in replaced}
    roles |= {overrides[tag]: our_role for tag, our_role in _ROLE_TAGS.items() if tag in overrides}
    return Tags(
        role=overrides.get("role_tag", role),
        content=overrides.get("content_tag", content),
        roles=roles,
        train=overrides.get("train_tag"),
        thinking=thinking,
    )


def check_columns(kind: str, columns: Mapping[str, Sequence[str]], needs: Iterable[Sequence[str]]) -> None:
    """Raises `PluginError` where the columns of a format are no tuples of names, or where it needs one it has not."""
    for names in (*columns.values(), *needs):
        if isinstance(names, str):
            hint = f"a tuple of one name has a comma: ({names!r},); needs is a tuple of such tuples"
            raise PluginError(f"the format {kind!r} has a text, {names!r}, where a tuple of names stands", hint=hint)
    for wanted in (one for names in needs for one in names if one not in columns):
        raise undeclared(kind, wanted, "needs", columns)


def undeclared(kind: str, name: str, how: str, columns: Iterable[str]) -> PluginError:
    """The error for a column that is none of the format's."""
    known = sorted(columns)
    ask = "".join(f"did you mean {close}? " for close in get_close_matches(name, known, n=1))
    what = f"the format {kind!r} {how} a column {name!r}, which is none of its columns"
    return PluginError(what, hint=f"{ask}its columns are: {', '.join(known)}")
