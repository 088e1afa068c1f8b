"""The config of a stand-in for MOSS-VL."""

from tests.training import tiny_moss_vl


class MossVLConfig(tiny_moss_vl.MossVLConfig):
    """As elsewhere."""
