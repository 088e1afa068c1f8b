"""What the reference model gives the answers of a batch, wherever the reference is. K targets, S segments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from accelerate import PartialState
from accelerate.utils import reduce
from numpy.typing import NDArray
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from luthier.config.schema import RunConfig
from luthier.errors import ModelError
from luthier.models import evaluating, quantized, sharding
from luthier.models.passes import ModelPass
from luthier.objectives import AnyHead, Head
from luthier.objectives.hidden_loss import ReferenceHidden
from luthier.objectives.pair_formulas import sequence_scores, tail_discount
from luthier.packing.epoch import plan_epoch
from luthier.preparation.segments import SegmentIndex
from luthier.records import Batch, Targets
from luthier.store import SampleStore
from luthier.store.disk import Disk
from luthier.training.losses import pairs_of
from luthier.training.streams import EvalStream


class Reference(Protocol):
    """The model that an objective compares with."""

    @property
    def on_all_ranks(self) -> bool:
        """Whether all ranks have to ask as often, for batches too that hold nothing to compare."""
        ...

    def logps(self, batch: Batch, counts_K: torch.Tensor | None = None) -> torch.Tensor:
        """float32[S]: log-probability of each segment, the sum over its targets, each times what it counts."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReferenceModel:
    """A model at hand: a second one, or the policy without its adapter. Nothing of it is ever trained here.

    ``under_adapter``: the model is the policy itself, and what it is without the adapter is meant.
    """

    model: nn.Module
    forward: ModelPass
    under_adapter: bool = False

    @property
    def on_all_ranks(self) -> bool:
        """See `Reference`; ranks that hold parts of a model run it together."""
        return sharding.is_sharded(self.model)

    def logps(self, batch: Batch, counts_K: torch.Tensor | None = None) -> torch.Tensor:
        logps_K, targets = self._token_logps(batch)
        return sequence_scores(logps_K, targets.segments_K, batch.num_segments, counts_K=counts_K).logps_S

    def token_logps(self, batch: Batch) -> torch.Tensor:
        """float32[K]: log-probability of each target."""
        return self._token_logps(batch)[0]

    def _token_logps(self, batch: Batch) -> tuple[torch.Tensor, Targets]:
        with self._as_reference():
            scored, targets = self.forward.token_scores(self.model, batch)
        return scored.scores.logps_K, targets

    def hidden(self, batch: Batch) -> ReferenceHidden:
        """Its hidden states at the targets, with its head, for losses that compare whole distributions."""

        def keep(hidden_KD: torch.Tensor, head: AnyHead, _: Targets) -> ReferenceHidden:
            if not isinstance(head, Head):
                raise ModelError(
                    "a loss that compares whole distributions needs the reference's output layer as it is, and here it "
                    "is adapted, or cannot be told apart from the model",
                    hint="set objective.reference: model, or choose another objective.loss",
                )
            return ReferenceHidden(hidden_KD=hidden_KD, head=head)

        with self._as_reference():
            scored, _ = self.forward.scored(self.model, batch, keep)
        return scored.scores

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        without = nullcontext()
        if self.under_adapter:
            assert isinstance(self.model, PeftModel), "a model without adapter has nothing under it"
            without = self.model.disable_adapter()
        with evaluating(self.model), torch.no_grad(), without:  # no dropout
            yield


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrecomputedReference:
    """Log-probabilities that were computed before training: ``logps_L`` float32, by the number of the leaf."""

    logps_L: torch.Tensor
    device: torch.device

    @property
    def on_all_ranks(self) -> bool:
        return False

    def logps(self, batch: Batch, counts_K: torch.Tensor | None = None) -> torch.Tensor:
        """See `Reference`; what targets count was settled when they were computed."""
        leaves = [leaf for unit in batch.units for leaf in unit.leaves]
        return self.logps_L[torch.tensor(leaves, dtype=torch.int64)].to(self.device)


# --------------------------------------------------------------------------------------------------------------------
# Log-probabilities of the reference model, computed once and kept beside the samples.
#
# <store>/references/<digest>.safetensors   keys uint8[n, 32], leaves int32[n], logps float32[n]
#
# The digest covers the reference's weights and settings and all that decides which tokens of a row are scored, so
# what is found under it is what would be computed; rows are found again by their keys, however the store has grown. L
# leaves of the store.


FOLDER = "references"
SAID_OF_FILES = ("_name_or_path", "base_model_name_or_path", "transformers_version", "use_cache")  # not of results
ADAPTER_PARTS = (".lora_", ".oft_", ".modules_to_save.")  # in the names of what a base goes without


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Precomputation:
    """What is to be scored: of each side, training and held-out rows, the segments that the run needs, by number.

    The streams go over all of them, on this rank its share. All are of one ``store``. ``ld_alpha``: what targets beyond
    the shorter answer's length count.
    """

    store: SampleStore
    sides: Sequence[tuple[SegmentIndex, EvalStream, NDArray[np.int64]]]
    ld_alpha: float


def precomputed_reference(config: RunConfig, work: Precomputation, reference: ReferenceModel) -> PrecomputedReference:
    """The table, read where it was computed before, else computed on all ranks together and kept."""
    digest = _digest(config, work, reference)
    path = work.store.folder / FOLDER / f"{digest}.safetensors"
    needed_N = np.unique(np.concatenate([_leaves_of(index)[needed] for index, _, needed in work.sides]))
    PartialState().wait_for_everyone()
    known_L = _read(path, work.store)
    missing = torch.tensor(float(np.isnan(known_L[needed_N]).any()), device=reference.forward.device)
    if float(reduce(missing, reduction="sum")):
        known_L = _compute(known_L, work, reference)
        if PartialState().is_main_process:
            _write(path, work.store, known_L)
        PartialState().wait_for_everyone()
    return PrecomputedReference(logps_L=torch.from_numpy(known_L), device=reference.forward.device)


def _compute(known_L: NDArray[np.float32], work: Precomputation, reference: ReferenceModel) -> NDArray[np.float32]:
    """The table with what it lacks; batches all of which is known are passed over."""
    found_2L = np.zeros((2, len(work.store.leaf_lengths)), dtype=np.float32)  # log-probabilities; 1 where there is one
    for _, whole, needed in work.sides:
        rows = np.unique(whole.rows.rows_of(needed))
        stream = replace(whole, plan=plan_epoch(whole.rows, whole.plan.settings, epoch=0, order=rows))
        for batch in stream:
            leaves = [leaf for unit in batch.units for leaf in unit.leaves]
            if not (reference.on_all_ranks or np.isnan(known_L[leaves]).any()):
                continue
            logps_S = reference.logps(batch, _counts(batch, work.ld_alpha, reference.forward.device))
            found_2L[0, leaves] = logps_S.float().cpu().numpy()
            found_2L[1, leaves] = 1
    reduced: torch.Tensor = reduce(torch.from_numpy(found_2L).to(reference.forward.device), reduction="sum")
    total_L, ranks_L = reduced.cpu().numpy()
    # rows of the same content are one sample, which several ranks may have scored
    completed_L: NDArray[np.float32] = np.where(ranks_L > 0, total_L / np.maximum(ranks_L, 1), known_L)
    return completed_L


def _counts(batch: Batch, ld_alpha: float, device: torch.device) -> torch.Tensor | None:
    if ld_alpha == 1:
        return None
    return tail_discount(batch.targets.segments_K, batch.num_segments, pairs_of(batch), ld_alpha=ld_alpha).to(device)


def _digest(config: RunConfig, work: Precomputation, reference: ReferenceModel) -> str:
    """Hex digest of the weights, and of how rows become tokens that are scored."""
    how = {
        "fingerprint": work.store.fingerprint,
        "max_length": config.data.max_length,
        "overflow": config.data.overflow.value,
        "ld_alpha": work.ld_alpha,
        "dtype": config.train.precision.value,
        "model": _settings(reference),
    }
    digest = hashlib.sha256(json.dumps(how, sort_keys=True, default=sorted).encode())  # PEFT has sets of names
    for name, values in weights_of(reference):
        digest.update(name.encode())
        digest.update(xxhash.xxh3_128_digest(values))
    return digest.hexdigest()[:32]


def _settings(reference: ReferenceModel) -> dict[str, object]:
    """What is computed with the weights: windows, rotations, scales, those of an adapter too."""
    model: Any = reference.model
    sections = {"model": model.config.to_dict()}
    if isinstance(model, PeftModel) and not reference.under_adapter:
        sections |= {name: section.to_dict() for name, section in model.peft_config.items()}
    return {
        name: {key: value for key, value in section.items() if key not in SAID_OF_FILES}
        for name, section in sections.items()
    }


def weights_of(reference: ReferenceModel) -> Iterator[tuple[str, memoryview]]:
    """All that a checkpoint of the model would hold: scales of quantized weights, and layers that have no weight."""
    adapter = ADAPTER_PARTS if reference.under_adapter else ()
    sharding.give_up_gathered(reference.model)  # torch frees what it gathered, and cannot while numpy looks at it
    for name, value in sorted(reference.model.state_dict().items()):
        if any(part in name for part in adapter) or not isinstance(value, torch.Tensor):
            continue
        for tensor in quantized.held_tensors(sharding.undivided(value)):
            raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}", raw.data


def _leaves_of(index: SegmentIndex) -> NDArray[np.int64]:
    """int64[n]: the leaves, by number in the store, that the segments of an index are."""
    leaf, *_ = index.cuts()
    return index.prepared.store.leaf_bounds[index.sample_ids] + leaf


def _read(path: Path, store: SampleStore) -> NDArray[np.float32]:
    """float32[L]; not a number where nothing is known."""
    known_L = np.full(len(store.leaf_lengths), np.nan, dtype=np.float32)
    try:
        tensors = load_file(path)
    except (FileNotFoundError, SafetensorError):
        return known_L
    samples = store.lookup(tensors["keys"].numpy())
    is_there = samples >= 0
    places = store.leaf_bounds[samples[is_there]] + tensors["leaves"].numpy()[is_there]
    known_L[places] = tensors["logps"].numpy()[is_there]
    return known_L


def _write(path: Path, store: SampleStore, known_L: NDArray[np.float32]) -> None:
    """Keep all that is known, other data's rows too. Raises `StoreError`."""
    known_N = np.flatnonzero(~np.isnan(known_L))
    samples = np.searchsorted(store.leaf_bounds, known_N, side="right") - 1
    content = save(
        {
            "keys": torch.from_numpy(store.keys_of(samples)),
            "leaves": torch.from_numpy((known_N - store.leaf_bounds[samples]).astype(np.int32)),
            "logps": torch.from_numpy(known_L[known_N]),
        }
    )
    disk = Disk()
    disk.make_folder(path.parent)
    disk.publish(path, [content])
