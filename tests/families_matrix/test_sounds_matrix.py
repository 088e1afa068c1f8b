"""Every family that hears, from a folder and rows in a file to its model: a batch is what its processor makes of the
same conversations in one call, gradients reach what hears, and a row means the same in company as alone.

`LUTHIER_MEDIA_SEED` draws other lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from luthier.collation import CollateSettings
from luthier.media.families import PackingSupport
from luthier.models import model_needs, multimodal_class
from luthier.models.batch_invariance import hook
from luthier.models.isolation import choose_isolation
from luthier.models.mixers import Isolation
from luthier.records import Batch
from tests.families_matrix.hearing_cases import ONE_EACH, Heard, Hearing, rows_of, tower_names
from tests.families_matrix.matrix_cases import UNLEARNED
from tests.families_matrix.stand_ins import stand_ins
from tests.families_matrix.tiny_hearing import CONFIGS

CPU = torch.device("cpu")
FAMILIES = sorted(CONFIGS)
PICTURES = ["gemma3n", "gemma4", "gemma4_unified", "nemotron_h_omni", "qwen2_5_omni", "qwen3_omni_moe"]
NO_TINY_PICTURES = ["phi4_multimodal"]  # its tower takes pictures of one size, 448 pixels
# What is ours alone: the model would count positions itself.
OURS = {"position_ids"}

Arrays = dict[str, NDArray[Any]]


def real_frames(ours: Arrays, own: Arrays, lengths: Sequence[int]) -> None:
    """Gemma 3n. Alone, frames end with the last that lies within the sound; in company silence goes on behind it, and
    is neither marked as filling nor hidden from the encoder, which hears frames of silence as of a sound. Ours end as
    alone, and what fills them up is 0, as the encoder itself fills up.
    """
    real_NF = ours.pop("input_features_mask")
    assert np.all(own.pop("input_features_mask") >= real_NF)
    np.testing.assert_array_equal(ours.pop("input_features")[real_NF], own.pop("input_features")[real_NF])


def but_for_the_last_frame(ours: Arrays, own: Arrays, lengths: Sequence[int]) -> None:
    """Qwen3-Omni, Qwen3-ASR. Behind the end of a sound its last frame hears the sound mirrored where it is alone, and
    silence where a longer one is in the call. Filling is 0 where the processor has the spectrum of silence: Qwen3-Omni
    reads none of it; convolutions of Qwen3-ASR do, and alone it is 0 there too.
    """
    pairs = zip(ours.pop("input_features"), own.pop("input_features"), lengths, strict=True)
    for frames_HF, other_HF, length in pairs:
        whole = length // 160 - 1
        np.testing.assert_allclose(frames_HF[:, :whole], other_HF[:, :whole], rtol=0, atol=1e-5)


def but_for_the_last_pairs(ours: Arrays, own: Arrays, lengths: Sequence[int]) -> None:
    """Granite Speech. The same, of frames that are joined in pairs; its encoder hears all that fills up."""
    pairs = zip(ours.pop("input_features"), own.pop("input_features"), lengths, strict=True)
    for frames_FC, other_FC, length in pairs:
        whole = (length // 160 + 1) // 2 - 2
        np.testing.assert_allclose(frames_FC[:whole], other_FC[:whole], rtol=0, atol=1e-5)


def to_rounding(ours: Arrays, own: Arrays, lengths: Sequence[int]) -> None:
    """Nemotron Omni sums over the frames of a sound with zeros behind them, or without."""
    np.testing.assert_allclose(ours.pop("input_features"), own.pop("input_features"), rtol=0, atol=1e-5)


# Where company changes what a processor makes of a sound, ours is what inference hears of it alone.
EXCEPTIONS: dict[str, Callable[[Arrays, Arrays, Sequence[int]], None]] = {
    "gemma3n": real_frames,
    "granite_speech": but_for_the_last_pairs,
    "qwen3_asr": but_for_the_last_frame,
    "qwen3_omni_moe": but_for_the_last_frame,
    "nemotron_h_omni": to_rounding,
}


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Hearing]]:
    @cache
    def of(family: str) -> Hearing:
        return Hearing(family, tmp_path_factory.mktemp(family))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with stand_ins():
        yield of
    torch.set_num_threads(threads)


def compared(batch: Batch, own: dict[str, Any]) -> tuple[Arrays, Arrays]:
    """Both as arrays, by their names; what is ours alone left out."""
    inputs = {name: value for name, value in batch.model_inputs.items() if isinstance(value, torch.Tensor)}
    ours = {name: value.numpy() for name, value in inputs.items() if name not in OURS}
    return ours, {name: np.asarray(value) for name, value in own.items()}


def assert_equal(ours: Arrays, own: Arrays) -> None:
    assert ours.keys() == own.keys()
    for name, value in own.items():
        assert ours[name].dtype == value.dtype, name
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize("kind", ["single", "several", "several in a row", "text", "mixed", "mixed with pictures"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_the_processors_own(family: str, kind: str, hearing: Callable[[str], Hearing]) -> None:
    case = hearing(family)
    if kind == "mixed with pictures" and case.media.family.image is None:
        pytest.skip("it sees nothing")
    rows = rows_of(family, kind)
    if (family in ONE_EACH and kind == "several in a row") or (family == "qwen3_asr" and kind == "text"):
        pytest.skip("its class takes as many sounds as texts")
    ours, own = compared(case.batch(case.segments(rows), packed=False), case.own(rows))
    lengths = [length for row in rows for length in row.sounds]
    if len(lengths) > 1 and family in EXCEPTIONS:
        EXCEPTIONS[family](ours, own, lengths)
    assert_equal(ours, own)


@pytest.mark.parametrize("family", EXCEPTIONS)
def test_where_company_changes_nothing_there_is_no_exception(family: str, hearing: Callable[[str], Hearing]) -> None:
    """Sounds of one length are the processor's own to the last frame."""
    case, rows = hearing(family), [Heard((16_000,)), Heard((16_000,))]
    ours, own = compared(case.batch(case.segments(rows), packed=False), case.own(rows))
    for name, value in own.items():
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_a_batch_of_other_sounds_is_noticed(hearing: Callable[[str], Hearing]) -> None:
    """The comparison can fail: one sound is another of the same length."""
    case, rows = hearing("qwen2_audio"), rows_of("qwen2_audio", "several")
    ours, own = compared(case.batch(case.segments(rows), packed=False), case.own(rows))
    own["input_features"][1, 0, 3] += 1e-6
    with pytest.raises(AssertionError, match="input_features"):
        assert_equal(ours, own)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_what_hears(family: str, hearing: Callable[[str], Hearing]) -> None:
    case = hearing(family)
    model = case.model().train()
    rows = rows_of(family, "mixed with pictures" if family in PICTURES else "mixed")
    inputs = case.batch(case.segments(rows), packed=False).model_inputs
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    loss = model(**inputs, labels=labels).loss
    assert torch.isfinite(loss)
    loss.backward()
    names = [name for name in tower_names(model) if name not in UNLEARNED]
    assert names or family in {"gemma4_unified", "apertus1p5"}  # which hears samples as they are, and which codes
    modules = dict(model.named_modules())
    hears = [name for name in case.media.family.modules.projector if "vis" not in name and "image" not in name]
    for name in (*names, *(name for name in hears if name in modules)):
        gradients = [weight.grad for weight in modules[name].parameters() if weight.grad is not None]
        assert gradients and all(bool(torch.isfinite(gradient).all()) for gradient in gradients), name
        assert any(bool(gradient.any()) for gradient in gradients), name


@pytest.mark.parametrize("kind", ["several", "mixed", "mixed with pictures"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_means_the_same_in_company_as_alone(family: str, kind: str, hearing: Callable[[str], Hearing]) -> None:
    """Logits of packed rows where the family packs, and of padded ones."""
    if kind == "mixed with pictures" and family not in PICTURES:
        pytest.skip("no tiny model of it sees")
    case = hearing(family)
    model = case.model()
    segments = case.segments(rows_of(family, kind))
    with torch.no_grad():
        alone = [model(**case.batch([each], packed=False).model_inputs).logits[0] for each in segments]
        padded = model(**case.batch(segments, packed=False).model_inputs).logits
        check_close([padded[row, : len(right)] for row, right in enumerate(alone)], alone)
        how = CollateSettings(packed=True, pad_token_id=case.processor.tokenizer.pad_token_id)
        chosen = choose_isolation(model, case.segments([Heard()] * 2), how, device=CPU, needs=model_needs(model))
        batch = chosen.arranged(case.batch(segments, packed=True), pad_token_id=how.pad_token_id)
        found = model(**chosen.inputs(batch, device=CPU)).logits
    assert (chosen.isolation is Isolation.PADDED) == (case.media.family.packing is PackingSupport.PADDED), chosen.notes
    if chosen.isolation is Isolation.PADDED:
        check_close([found[row, : len(right)] for row, right in enumerate(alone)], alone)
    else:
        check_close([found[0]], [torch.cat(alone)])


def check_close(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    """Logits, relative to the largest."""
    largest = max(float(logits.abs().max()) for logits in right)
    for ours, theirs in zip(found, right, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-4 * largest


@pytest.mark.parametrize("family", ["granite_speech", "nemotron_h_omni"])
def test_batch_norm_computes_in_training_as_at_inference_and_its_means_stay(
    family: str, hearing: Callable[[str], Hearing]
) -> None:
    case = hearing(family)
    torch.manual_seed(0)
    model = multimodal_class(case.config).from_config(case.config).float().train()
    before = {name: value.clone() for name, value in model.named_buffers() if "running" in name}
    inputs = case.batch(case.segments(rows_of(family, "several")), packed=False).model_inputs
    with torch.no_grad():
        assert float((model(**inputs).logits - model.eval()(**inputs).logits).abs().max()) > 1e-4, "control"
        for name, value in before.items():
            model.get_buffer(name).copy_(value)
        hook(model)
        learned = model.train()(**inputs).logits
        check_close([learned], [model.eval()(**inputs).logits])
    assert before and all(torch.equal(model.get_buffer(name), value) for name, value in before.items())


@pytest.mark.parametrize("family", ["granite_speech", "nemotron_h_omni", "phi4_multimodal"])
def test_without_hooks_filling_is_heard(family: str, hearing: Callable[[str], Hearing]) -> None:
    """Why `hear_own_frames` is there: transformers' encoders make another thing of a sound beside a longer one."""
    case = hearing(family)
    model = case.model()
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    segments = case.segments([Heard((9_080,)), Heard((32_000,))])
    with torch.no_grad():
        alone = model(**case.batch(segments[:1], packed=False).model_inputs).logits[0]
        both = model(**case.batch(segments, packed=False).model_inputs).logits[0, : len(alone)]
    assert float((both - alone).abs().max()) > 1e-3 * float(alone.abs().max())
