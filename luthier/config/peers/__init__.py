"""Run descriptions of other tools, read as they are, and those that are not read, told by their names."""

from __future__ import annotations

from luthier.config.peers.axolotl import AXOLOTL
from luthier.config.peers.llamafactory import LLAMA_FACTORY
from luthier.config.peers.llamafactory_v1 import LLAMA_FACTORY_V1
from luthier.config.peers.swift import SWIFT
from luthier.config.peers.swift_v2 import SWIFT_2
from luthier.config.peers.translation import OUR_SECTIONS, Peer
from luthier.config.peers.trl import TRL
from luthier.config.tree import MappingNode
from luthier.errors import Problem

__all__ = ["PEERS", "Peer", "peer_of", "unread_file"]

PEERS = (TRL, LLAMA_FACTORY, LLAMA_FACTORY_V1, AXOLOTL, SWIFT, SWIFT_2)
_ANEW = "write a run description: docs/howto/coming_from.md says how, and luthier quickstart writes one to begin with"
_OF_SWIFT = frozenset({"train_type", "tuner_type", "rlhf_type", "freeze_vit", "freeze_aligner", "model_author"})


def peer_of(tree: MappingNode) -> Peer | None:
    """The tool that a description is written for; None for one of ours, and for one that nothing tells."""
    return next((peer for peer in PEERS if peer.is_its(tree)), None)


def unread_file(tree: MappingNode) -> Problem | None:
    """What is wrong with a file of a tool whose files are not read; None for all others. One reason is enough for it:
    each of its keys would be another."""
    keys = tree.entries.keys()
    if any(key.startswith("top.") for key in keys):
        what = "these are the fields of LLaMA Board, LLaMA-Factory's web page, and no training file"
        hint = "name the training_args.yaml of the run's output folder, or save what Preview command shows as YAML"
    elif "dataset_mixer" in keys:
        what = "this is a file of the alignment-handbook's, whose dataset_mixer no other tool reads"
        hint = "write datasets: [{path: OWNER/NAME}] in its place, or dataset_name: OWNER/NAME, as TRL has it"
    elif any(isinstance(node, MappingNode) and "_component_" in node.entries for node in tree.entries.values()):
        what, hint = "this is a file of torchtune's, which are not read", _ANEW
    elif isinstance(own := tree.entries.get("training"), MappingNode) and "training_type" in own.entries:
        what, hint = "this is a file of Unsloth's command, which are not read", _ANEW
    elif _OF_SWIFT & keys and not keys & (OUR_SECTIONS - {"model"}):
        what = "this is a file of ms-swift's that does not name both a model and a dataset, as files that are read do"
        hint = "add the lines that are missing; files of megatron sft are not read"
    else:
        return None
    key = next(iter(keys))
    return Problem(where=str(tree.entries[key].where), key="", what=what, hint=hint)
