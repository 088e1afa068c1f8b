"""The model of a stand-in for MOSS-VL, which says of its head what code for transformers 4 says."""

from tests.training import tiny_moss_vl

from .configuration_moss_vl import MossVLConfig  # noqa: TID252  beside it, wherever that is


class MossVLForConditionalGeneration(tiny_moss_vl.MossVL):
    """Whether it is one with embeddings, its config says."""

    config_class = MossVLConfig
    _tied_weights_keys = ["lm_head.weight"]  # noqa: RUF012
