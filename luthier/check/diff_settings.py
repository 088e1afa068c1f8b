"""What two run descriptions set differently, as far as it may decide tokens and targets."""

from __future__ import annotations

from dataclasses import dataclass

from luthier.config.schema import RunConfig

SECTIONS = ("model", "data", "template", "media")
IGNORED = {"data.store", "data.workers"}  # where and how samples are made, not what is in them


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting that decides what is learned and differs: ``template.train_on``, ``assistant`` and ``all``."""

    key: str
    a: str
    b: str


def changed_settings(a: RunConfig, b: RunConfig) -> list[Setting]:
    """The settings of ``model``, ``data``, ``template``, ``media`` that differ: what may decide tokens and targets."""
    one, other = (_flat(config.model_dump(mode="json", include=set(SECTIONS))) for config in (a, b))
    keys = [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key) and key not in IGNORED]
    return [Setting(key=key, a=str(one.get(key, "–")), b=str(other.get(key, "–"))) for key in keys]


def _flat(value: object, prefix: str = "") -> dict[str, object]:
    if isinstance(value, dict) and value:
        return {
            key: one for name, item in value.items() for key, one in _flat(item, f"{prefix}.{name}".lstrip(".")).items()
        }
    if isinstance(value, list) and value:
        return {key: one for n, item in enumerate(value) for key, one in _flat(item, f"{prefix}[{n}]").items()}
    return {prefix: value}
