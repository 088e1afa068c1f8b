"""The engines that run a model of transformers in this process: it answers prompts, or gives rewards to sequences.

B sequences, T tokens, padded on the right: a causal model's last real token sees no padding
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from threading import Condition, Lock, Thread, current_thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel

from luthier.collation import MediaInputs
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Completion, Ids, NewTokens, OnTokens, Refusal, Request, Session, WeightsName
from luthier.engines.answering import Answerer, Answering
from luthier.engines.joined import rows_can_join
from luthier.engines.next_tokens import Follower
from luthier.errors import CheckpointError, ModelError, UserError
from luthier.models import evaluating, plain_model
from luthier.models.adapter_files import load_to_answer
from luthier.models.model import REWARD_HEAD
from luthier.models.passes import reward_head
from luthier.models.sharding import restore_weights, uncompiled
from luthier.records import MediaItem
from luthier.writing import counted

NO_ADAPTER = "<base>"


class LocalEngine:
    """Answers prompts with a model, ``batch_size`` rows at a time.

    A row that is finished makes room for the next at once, and a prompt is read once for all its samples, where the
    model keeps nothing but keys and values and a trial on the model itself shows that rows may join others. Models with
    other states, and those that read media, answer batch by batch. (Transformers' own continuous batching has no random
    numbers and no penalties of a request's own, and sets the model's attention to another.)

    An answer does not depend on its batch: each row has its own settings, stops and random numbers, and padding takes
    no part in anything. Batches are rounded in different ways, so a draw that rounding could decide is made by a
    forward pass of its row alone (not of every model: `Answerer.alone`). Searches with beams run one prompt at a time.

    The model is left in the mode it was in, and so are all generators of random numbers. What its own generation config
    says is not followed. ``media`` makes the inputs of prompts with pictures, videos or sounds. Any thread may call it:
    they take turns.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: Tokenizer,
        *,
        media: MediaInputs | None = None,
        batch_size: int = 8,
    ) -> None:
        self.model, self.tokenizer, self.media, self.batch_size = model, tokenizer, media, batch_size
        self._next, self._model = Lock(), Lock()
        self._adapter: str | None = None

    def under(self, adapter: str) -> LocalEngine:
        """The same engine answering with one of the model's adapters by its name, `NO_ADAPTER` with none of them. Both
        may be asked at a time: they take turns with the model. Where there is more than one, ask none but such."""
        found = copy(self)
        found._adapter = adapter
        found.__dict__.pop("_answerer", None)  # the model is tried with its adapter
        return found

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion | Refusal]:
        """The answers as they are finished; short prompts begin first. A request whose media cannot be had any more, or
        whose prompt leaves no room under ``max_length``, is refused."""
        answering: Answering | None = None
        for request in sorted(requests, key=lambda request: (request.settings.num_beams > 1, len(request.prompt))):
            answering = answering or self._begin()
            answering.add(request)
        while answering is not None and answering.busy:
            with self._at_work():
                while answering.busy and len(answering.ended) < self.batch_size:
                    answering.step()
                    if answering.ended and self._next.locked():  # another thread waits for the model
                        break
            while answering.ended:
                ended = answering.ended.popleft()
                yield ended if isinstance(ended, Refusal) else ended.completion()

    def change(self, change: Callable[[], None]) -> None:
        """Change the weights of the model while nobody computes with it."""
        with self._at_work():
            change()

    def session(self) -> Session:
        """A thread that answers requests as they come, until it is closed."""
        return LocalSession(self._begin(), self._at_work, self._next.locked)

    def score(self, ids: Ids, start: int, media: Sequence[MediaItem] = ()) -> NDArray[np.float32]:
        """Log-probabilities of ``ids[start:]``, float32[T - start]. Raises `RowError` for media that are gone."""
        return self.scored(ids, start, media).logprobs

    def scored(self, ids: Ids, start: int, media: Sequence[MediaItem] = (), *, top: int = 0) -> NewTokens:
        """``ids[start:]`` as if they had been emitted, with the ``top`` likeliest tokens at each place."""
        features = {} if self.media is None else self.media.features(media)
        with self._at_work():
            return self._answerer.scored(ids, start, features, top)

    def _begin(self) -> Answering:
        """Nothing asked so far. The model is tried at the first time."""
        with self._at_work():
            return Answering(self._answerer)

    @cached_property
    def _answerer(self) -> Answerer:
        joins = self.media is None and rows_can_join(self.model, base_of(self.model))
        return Answerer(
            model=self.model, tokenizer=self.tokenizer, media=self.media, batch_size=self.batch_size, joins=joins
        )

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """The model for one thread, as it generates: in evaluation mode, uncompiled, without its own generation config,
        which transformers follows wherever nothing else is said. Threads get it in the order in which they ask."""
        with self._next:  # held by who is next, so that nobody overtakes
            self._model.acquire()
        base = base_of(self.model)
        own = base.generation_config
        try:
            base.generation_config = GenerationConfig()
            with evaluating(self.model), uncompiled(self.model), torch.no_grad(), self._with_adapter():
                yield
        finally:
            base.generation_config = own
            self._model.release()

    @contextmanager
    def _with_adapter(self) -> Iterator[None]:
        if self._adapter is None or not isinstance(self.model, PeftModel):
            yield
        elif self._adapter == NO_ADAPTER:
            with self.model.disable_adapter():
                yield
        else:
            if self.model.active_adapter != self._adapter:
                self.model.set_adapter(self._adapter)
            yield


def base_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The model of transformers itself, without its adapter."""
    base = plain_model(model)
    assert isinstance(base, PreTrainedModel), "what answers is a model of transformers"
    return base


# --------------------------------------------------------------------------------------------------------------------
# A thread that answers requests as they come.


_MOST_SECONDS = 60.0  # that a step may take when a session is closed

logger = logging.getLogger(__name__)


class LocalSession:
    """A `Session` over the model of a `LocalEngine`, which it leaves to others between two steps where they want it.

    A step that fails (most often for want of memory) ends the requests that were being answered, each with a `Refusal`
    whose reason is ``engine_failed``. Those that wait are answered.
    """

    def __init__(
        self, answering: Answering, at_work: Callable[[], AbstractContextManager[None]], is_wanted: Callable[[], bool]
    ) -> None:
        self._answering, self._at_work, self._is_wanted = answering, at_work, is_wanted
        self._changed = Condition()
        self._new: list[tuple[Request, Follower]] = []
        self._followers: dict[int, Follower] = {}
        self._closed = False
        self._thread = Thread(target=self._run, name="luthier-session", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_tokens: OnTokens) -> None:
        """Begin an answer. Raises `ValueError` for a key that is in use, or in a session that is closed."""
        left = request.num_samples

        def tell(told: NewTokens | Refusal) -> None:
            nonlocal left
            left -= isinstance(told, NewTokens) and told.finish is not None
            ended = left == 0 or isinstance(told, Refusal)
            try:
                on_tokens(told)
            except Exception:
                ended = True
                raise
            finally:
                if ended:
                    self._forget(request.key)

        follower = Follower(tell)
        with self._changed:
            if self._closed or request.key in self._followers:
                why = "this session is closed" if self._closed else f"request {request.key} is being answered"
                raise ValueError(f"{why}: no request {request.key} can begin")
            self._followers[request.key] = follower
            self._new.append((request, follower))
            self._changed.notify()

    def cancel(self, key: int) -> None:
        """End a request's answers where they are. Nothing is done for one that has ended, or never was."""
        follower = self._forget(key)
        if follower is not None:
            follower.cancel()

    def close(self) -> None:
        """Cancel all requests, and end the thread: it ends after the step that it is in."""
        with self._changed:
            self._closed = True
            keys = list(self._followers)
            self._changed.notify()
        for key in keys:
            self.cancel(key)
        if self._thread is not current_thread():
            self._thread.join(_MOST_SECONDS)

    def keys(self) -> tuple[int, ...]:
        """The requests that wait or are being answered."""
        with self._changed:
            return tuple(self._followers)

    def _forget(self, key: int) -> Follower | None:
        with self._changed:
            return self._followers.pop(key, None)

    def _run(self) -> None:
        while self._has_work():
            with self._at_work():
                while self._answering.busy:
                    try:
                        self._answering.step()
                    except Exception as error:
                        logger.exception("A step of a session has failed.")
                        self._answering.fail(f"{type(error).__name__}: {error}")
                    if self._is_wanted():
                        break
                    self._take_new()

    def _has_work(self) -> bool:
        """Wait for something to do. False when the session is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._answering.busy or self._closed)
        self._take_new()
        return self._answering.busy or not self._closed

    def _take_new(self) -> None:
        with self._changed:
            new, self._new = self._new, []
        for request, follower in new:
            self._answering.add(request, follower)


TOKENS_AT_ONCE = 16_384  # padding included


class RewardEngine:
    """Gives rewards to sequences, one or many at a time. Not for several threads at once."""

    def __init__(
        self, model: PreTrainedModel | PeftModel, tokenizer: Tokenizer, *, media: MediaInputs | None = None
    ) -> None:
        self._at_each_token = hasattr(plain_model(model), REWARD_HEAD)
        self._answerer = Answerer(model=model, tokenizer=tokenizer, media=media, batch_size=1, joins=False)

    @torch.no_grad()
    def reward(self, ids: Ids, media: Sequence[MediaItem] = ()) -> float:
        """The reward at the last token, int32[T], which is where training compares. (What transformers returns is
        that of the last token that is no padding, which a stop token may be, too.) Raises `RowError` for media."""
        answerer = self._answerer
        features = {} if answerer.media is None else answerer.media.features(media)
        inputs, _ = answerer.inputs([ids], [features])
        return float(self._rewards_BT(inputs)[0, -1])

    @torch.no_grad()
    def rewards(self, sequences: Sequence[Ids]) -> list[float]:
        """The reward of each, without media. Equal sequences have equal rewards, and no order matters: each is computed
        once, beside those of about its length. Raises `ModelError` for a model that gives more than one number."""
        places: dict[bytes, list[int]] = {}
        for place, ids in enumerate(sequences):
            places.setdefault(ids.astype(np.int64).tobytes(), []).append(place)
        once = sorted(places, key=lambda key: (len(key), key))
        found = [0.0] * len(sequences)
        start = 0
        while start < len(once):
            end = start + 1
            while end < len(once) and (end + 1 - start) * len(once[end]) // 8 <= TOKENS_AT_ONCE:
                end += 1
            for key, reward in zip(once[start:end], self._of_some(once[start:end]), strict=True):
                for place in places[key]:
                    found[place] = reward
            start = end
        return found

    def _of_some(self, keys: Sequence[bytes]) -> list[float]:
        some = [np.frombuffer(key, dtype=np.int64) for key in keys]
        ids_BT = np.full((len(some), max(map(len, some))), self._answerer.tokenizer.pad_token_id, dtype=np.int64)
        mask_BT = np.zeros_like(ids_BT)
        for row, ids in enumerate(some):
            ids_BT[row, : len(ids)] = ids
            mask_BT[row, : len(ids)] = 1
        device = next(self._answerer.model.parameters()).device
        inputs = {
            "input_ids": torch.from_numpy(ids_BT).to(device),
            "attention_mask": torch.from_numpy(mask_BT).to(device),
        }
        rewards_BT = self._rewards_BT(inputs)
        last_B = torch.from_numpy(mask_BT.sum(axis=1) - 1).to(rewards_BT.device).clamp(max=rewards_BT.shape[1] - 1)
        rewards: list[float] = rewards_BT.gather(1, last_B[:, None])[:, 0].tolist()
        return rewards

    def _rewards_BT(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """float32[B, T]: at each token; [B, 1] of a model that gives one number for all of them."""
        model = self._answerer.model
        if not self._at_each_token:
            logits_BN: torch.Tensor = model(**inputs).logits.float()
            if logits_BN.shape[1:] != (1,):
                raise ModelError(f"a reward model gives one number, and this one {tuple(logits_BN.shape[1:])}")
            return logits_BN
        taken: list[torch.Tensor] = []

        def take(layer: torch.nn.Module, arguments: tuple[Any, ...], rewards_BT1: torch.Tensor) -> None:
            taken.append(rewards_BT1)

        hook = reward_head(model).register_forward_hook(take)
        try:
            model(**inputs, use_cache=False)
        finally:
            hook.remove()
        return taken[-1].reshape(inputs["input_ids"].shape).float()


# ----------------------------------------------------------------------------------------------------------------------
# Weights that lie in a folder after a number of steps of a run, told by a digest, and a model that takes them.
#
# weights/00000012/model.safetensors, config.json …          a whole model
# weights/00000012/adapter_model.safetensors, adapter_config.json …    an adapter


ADAPTER_CONFIG = "adapter_config.json"
_SETTINGS = ("config.json", ADAPTER_CONFIG)  # what decides, beside the weights themselves, what a model computes
_AT_ONCE = 1 << 22  # bytes that are read of a file
_LOADING = Lock()  # transformers loads by a state of the whole process


def folder_of(root: Path, version: int) -> Path:
    """Where the weights after so many steps lie."""
    return root / f"{version:08d}"


def is_adapter(folder: Path) -> bool:
    """Whether the weights in a folder are those of an adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def digest_of(folder: Path) -> str:
    """Of all files of weights, with their names and sizes, and of the settings beside them. Raises `UserError` where
    there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no weights", hint="the run and the server must both see this folder")
    digest = blake2b(digest_size=16)
    for path in [*files, *(folder / name for name in _SETTINGS if (folder / name).is_file())]:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        for part in _parts(path):
            digest.update(part)
    return digest.hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(_AT_ONCE):
            yield part


class WeightsTaker:
    """Gives the model of an engine the weights that lie under ``root``. ``taken`` are those that it has; None: its own.

    An adapter is put on the model when the first one comes; a whole model takes the place of the weights.
    """

    def __init__(self, engine: LocalEngine, root: Path) -> None:
        self.engine, self.root = engine, root
        self.taken: WeightsName | None = None
        self._adapted = engine.model if isinstance(engine.model, PeftModel) else None
        self._settings: bytes | None = None  # of the adapter that is on

    def take(self, weights: WeightsName) -> None:
        """Have the model answer by these. It goes on with those that it had where they are not there, or not whole;
        what has failed on the way has no name. Raises `UserError`."""
        if self.taken == weights:
            return
        source = folder_of(self.root, weights.version)
        if (found := digest_of(source)) != weights.digest:
            after = f"the weights after {counted(weights.version, 'step')}"
            what = f"{after} have the digest {found} here, not {weights.digest}"
            raise UserError(what, hint="they are not whole yet, or of another run: --accept-weights names the folder")
        self.taken = None
        try:
            with _LOADING:
                self.engine.change(lambda: self._put(source))
        except (CheckpointError, ModelError) as error:
            raise UserError(
                f"the weights after {counted(weights.version, 'step')} do not fit the model: {error.message}"
            ) from error
        self.taken = weights

    def _put(self, source: Path) -> None:
        if not is_adapter(source):
            if self._adapted is not None:
                raise ModelError("they are those of a whole model, and an adapter is on this one")
            restore_weights(self.engine.model, source)
            return
        settings = (source / ADAPTER_CONFIG).read_bytes()
        if self._adapted is None:  # its layers stand in the model itself, which the engine goes on with
            self._adapted = load_to_answer(self.engine.model, str(source))
            self._adapted.eval()
        elif settings == self._settings:
            restore_weights(self._adapted, source)
        else:
            name = self._adapted.active_adapter
            self._adapted.delete_adapter(name)
            load_to_answer(self._adapted, str(source), name)
            self._adapted.set_adapter(name)
            self._adapted.eval()
        self._settings = settings
