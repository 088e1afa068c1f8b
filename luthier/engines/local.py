"""The engine that runs a model of transformers in this process, some prompts at a time.

# B rows, T tokens of prompts, padded on the left: what is generated follows the prompt's last token
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel

from luthier.collation import MediaInputs
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.engine import Completion, Finish, Ids, Refusal, Request
from luthier.engines.next_tokens import BatchRow, Choosing, Stopping
from luthier.errors import RowError
from luthier.media import PREFIX_TYPES
from luthier.models.compiled import uncompiled
from luthier.records import MediaItem


class LocalEngine:
    """Answers prompts with a model, ``batch_size`` at a time, those of about one length together.

    An answer does not depend on its batch: each row has its own settings, stops and random numbers, and padding takes
    no part in anything. (Rounding may differ between batches, as it does between machines: where two tokens are equally
    likely to the last digit, either may be chosen.) Searches with beams run one prompt at a time.

    The model is left in the mode it was in, and so are all generators of random numbers. What its own generation config
    says is not followed. ``media`` makes the inputs of prompts with pictures, videos or sounds.
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

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion | Refusal]:
        """The answers, batch by batch, short prompts first. A request whose media cannot be had any more, or whose
        prompt leaves no room under ``max_length``, is refused."""
        order = sorted(requests, key=lambda request: (request.settings.num_beams > 1, len(request.prompt)))
        rows = [(request, sample) for request in order for sample in range(request.num_samples)]
        for start in range(0, len(rows), self.batch_size):
            ready: list[BatchRow] = []
            refused: dict[int, Refusal] = {}
            features: dict[int, Any] = {}  # of the media of each request, which its samples share
            for request, sample in rows[start : start + self.batch_size]:
                try:
                    if request.key not in features and request.key not in refused:
                        features[request.key] = self._features(request)
                except RowError as error:
                    refused[request.key] = Refusal(key=request.key, reason=error.reason, detail=error.detail)
                    if sample == 0:  # else the batch before has told it
                        yield refused[request.key]
                if request.key in features:
                    ready.append(BatchRow(request=request, sample=sample, features=features[request.key]))
            drawn = [row for row in ready if row.settings.num_beams == 1]
            if drawn:
                yield from self._drawn(drawn)
            for row in ready:
                if row.settings.num_beams > 1:
                    yield self._searched(row)

    def score(self, ids: Ids, start: int, media: Sequence[MediaItem] = ()) -> NDArray[np.float32]:
        """Log-probabilities of ``ids[start:]``, float32[T - start]. Raises `RowError` for media that are gone."""
        features = {} if self.media is None else self.media.features(media)
        return self._scored(ids, start, features)

    def _features(self, request: Request) -> Any:
        limit = request.settings.max_length
        if limit is not None and len(request.prompt) >= limit:
            what = f"the prompt has {len(request.prompt)} tokens, generate.max_length is {limit}"
            raise RowError("prompt_too_long", what)
        assert self.media is not None or not request.media, "rows with media are read by a model with a processor"
        return {} if self.media is None else self.media.features(request.media)

    def _drawn(self, rows: Sequence[BatchRow]) -> Iterator[Completion]:
        inputs, width = self._inputs([row.request.prompt for row in rows], [row.features for row in rows])
        choosing, stopping = Choosing(rows, width), Stopping(rows, width, self.tokenizer)
        how = GenerationConfig(
            do_sample=False,  # of what `Choosing` leaves, which is one token
            max_new_tokens=max(row.room for row in rows),
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
        )
        with self._ready():
            out_BT = self.model.generate(
                **inputs, generation_config=how, logits_processor=[choosing], stopping_criteria=[stopping]
            )
        logprobs_BN = torch.stack(choosing.logprobs, dim=1).numpy()
        ids_BN = out_BT[:, width:].cpu().numpy().astype(np.int32)
        for number, (row, end, finish) in enumerate(zip(rows, stopping.ends, stopping.finishes, strict=True)):
            assert finish is not None, "every row ends at its room at the latest"
            yield Completion(
                key=row.request.key,
                sample=row.sample,
                ids=ids_BN[number, :end],
                logprobs=logprobs_BN[number, :end].astype(np.float32),
                finish=finish,
            )

    def _searched(self, row: BatchRow) -> Completion:
        """The best of some beams, by transformers' search."""
        inputs, width = self._inputs([row.request.prompt], [row.features])
        stopping = Stopping([row], width, self.tokenizer)
        with self._ready(), torch.random.fork_rng(devices=self._cuda()):
            torch.manual_seed(int(np.random.SeedSequence(row.noise_key).generate_state(1)[0]))
            out_T = self.model.generate(
                **inputs,
                generation_config=_beam_search(row, sorted(stopping.stops[0]), self.tokenizer),
                stopping_criteria=[_AnyString(row, width, self.tokenizer)],
            )[0, width:].cpu()
        for end in range(1, len(out_T) + 1):
            stopping(torch.cat([torch.zeros(width, dtype=out_T.dtype), out_T[:end]])[None], None)
        finish, end = stopping.finishes[0] or Finish.LENGTH, stopping.ends[0]
        ids = np.concatenate([row.request.prompt, out_T[:end].numpy()]).astype(np.int32)
        scored = self._scored(ids, len(row.request.prompt), row.features)
        new = ids[len(row.request.prompt) :]
        return Completion(key=row.request.key, sample=row.sample, ids=new, logprobs=scored, finish=finish)

    @torch.no_grad()
    def _scored(self, ids: Ids, start: int, features: Any) -> NDArray[np.float32]:
        inputs, _ = self._inputs([ids], [features])
        if PREFIX_TYPES in inputs:
            inputs[PREFIX_TYPES][:, start:] = 1  # the answer does not see itself both ways
        with self._ready():
            logits_TV = self.model(**inputs, use_cache=False).logits[0, start - 1 : -1].float()
        new_T1 = torch.from_numpy(ids[start:].astype(np.int64)).to(logits_TV.device)[:, None]
        return np.asarray(logits_TV.log_softmax(-1).gather(1, new_T1)[:, 0].cpu().numpy(), dtype=np.float32)

    def _inputs(self, prompts: Sequence[Ids], features: Sequence[Any]) -> tuple[dict[str, torch.Tensor], int]:
        """What the model is given, and how wide it is."""
        width = max(map(len, prompts))
        ids_BT = np.full((len(prompts), width), self.tokenizer.pad_token_id, dtype=np.int64)
        mask_BT = np.zeros_like(ids_BT)
        for row, prompt in enumerate(prompts):
            ids_BT[row, width - len(prompt) :] = prompt
            mask_BT[row, width - len(prompt) :] = 1
        arrays = {"input_ids": ids_BT, "attention_mask": mask_BT}
        if self.media is not None:
            arrays |= self.media.of_prompts(ids_BT, features)
        device = next(self.model.parameters()).device
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}, width

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """The model as it generates: in evaluation mode, uncompiled, without its own generation config, which
        transformers follows wherever nothing else is said."""
        base, training = base_of(self.model), self.model.training
        own = base.generation_config
        base.generation_config = GenerationConfig()
        self.model.eval()
        try:
            with uncompiled(self.model), torch.no_grad():
                yield
        finally:
            base.generation_config = own
            self.model.train(training)

    def _cuda(self) -> list[torch.device]:
        device = base_of(self.model).device
        return [device] if device.type == "cuda" else []


def base_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The model of transformers itself, without its adapter."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel), "what answers is a model of transformers"
    return base


class _AnyString:
    """Ends each beam in which a stop string is complete."""

    def __init__(self, row: BatchRow, width: int, tokenizer: Tokenizer) -> None:
        self.stopping, self.strings, self.width = Stopping([row], width, tokenizer), row.settings.stop_strings, width

    def __call__(self, ids_BT: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:
        ended = [self.stopping.has_stop_string(self.strings, new_T) for new_T in ids_BT[:, self.width :]]
        return torch.tensor(ended, device=ids_BT.device)


def _beam_search(row: BatchRow, stops: Sequence[int], tokenizer: Tokenizer) -> GenerationConfig:
    """Every value that matters is said, as those that are not are filled in by transformers (top_k 50)."""
    told = row.settings
    of_sampling: dict[str, Any] = {}
    if told.do_sample:
        of_sampling = {
            "temperature": told.temperature or 1.0,
            "top_p": told.top_p or 1.0,
            "top_k": told.top_k or 0,
            "min_p": told.min_p,
        }
    return GenerationConfig(
        do_sample=told.do_sample,
        max_new_tokens=row.room,
        num_beams=told.num_beams,
        repetition_penalty=told.repetition_penalty or 1.0,
        no_repeat_ngram_size=told.no_repeat_ngram_size or 0,
        eos_token_id=list(stops),
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
        **({} if told.length_penalty is None else {"length_penalty": told.length_penalty}),
        **of_sampling,
    )
