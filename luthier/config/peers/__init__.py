"""Run descriptions of other tools, read as they are."""

from __future__ import annotations

from luthier.config.peers.axolotl import AXOLOTL
from luthier.config.peers.llamafactory import LLAMA_FACTORY
from luthier.config.peers.llamafactory_v1 import LLAMA_FACTORY_V1
from luthier.config.peers.translation import Peer
from luthier.config.peers.trl import TRL
from luthier.config.tree import MappingNode

__all__ = ["PEERS", "Peer", "peer_of"]

PEERS = (TRL, LLAMA_FACTORY, LLAMA_FACTORY_V1, AXOLOTL)


def peer_of(tree: MappingNode) -> Peer | None:
    """The tool that a description is written for; None for one of ours, and for one that nothing tells."""
    return next((peer for peer in PEERS if peer.is_its(tree)), None)
