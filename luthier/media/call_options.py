"""A run's options under the names that a family's processor has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from luthier.errors import ModelError
from luthier.media.area_limits import AreaLimits
from luthier.media.families import Family, MediaKind, Rule

if TYPE_CHECKING:
    from luthier.config.media import MediaConfig

Call = dict[str, dict[str, Any]]
# Which options are of which kind of media.
OPTIONS = {
    MediaKind.IMAGE: ("min_pixels", "max_pixels", "crop_to_patches", "pan_and_scan"),
    MediaKind.VIDEO: ("video_min_pixels", "video_max_pixels", "fps", "max_frames", "use_audio_in_video"),
    MediaKind.AUDIO: ("sampling_rate",),
}
# Those that are met without the processor's help where it has no setting for them.
LIMITS = ("min_pixels", "max_pixels")


def call_options(parts: Mapping[MediaKind, tuple[str, Any]], family: Family, options: MediaConfig) -> Call:
    """Keyword arguments for the processor: ``max_pixels`` -> ``{"images_kwargs": {"size": {"longest_edge": …}}}``.

    ``parts``: for each kind the argument's name and the part of the processor. Raises `ModelError` for an option that
    is set and that this family has no way to meet; options of kinds that it does not take mean nothing to it.
    """
    call: Call = {}
    for kind, (name, part) in parts.items():
        if (rule := family.rule(kind)) is None:
            continue
        chosen: dict[str, Any] = {}
        for key in OPTIONS[kind]:
            value = getattr(options, key)
            if value is None or (value is False and key not in rule.options):
                continue
            if key in rule.options:
                _set(chosen, part, rule.options[key], value)
            elif key not in LIMITS:
                raise _unknown_option(key, family, kind, rule)
        if chosen:
            call[name] = chosen
    return call


def area_limits(family: Family, options: MediaConfig) -> AreaLimits | None:
    """The limits of a picture's area that are not the processor's; None if there are none."""
    known = {} if family.image is None else family.image.options
    least = None if "min_pixels" in known else options.min_pixels
    most = None if "max_pixels" in known else options.max_pixels
    return None if least is None and most is None else AreaLimits(least=least, most=most)


def _set(chosen: dict[str, Any], part: Any, target: str, value: Any) -> None:
    name, _, entry = target.partition(".")
    chosen[name] = {**dict(chosen.get(name) or getattr(part, name) or {}), entry: value} if entry else value


def _unknown_option(key: str, family: Family, kind: MediaKind, rule: Rule) -> ModelError:
    known = [*rule.options, *(LIMITS if kind is MediaKind.IMAGE else ())]
    return ModelError(
        f"media.{key} is set, and the processor of {family.name} has no such option",
        hint=f"leave it out; for its {kind}s there are {', '.join(dict.fromkeys(known)) or 'none'}",
    )
