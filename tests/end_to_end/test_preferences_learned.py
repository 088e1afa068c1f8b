"""Preferences are learned: held-out pairs, ranked by the saved model as transformers loads and runs it.

`python -m benchmarks.preferences` does it for every example; here it is DPO alone, on a smaller model that begins with
random weights, in some seconds.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import luthier
from luthier.config.loading import load_config
from luthier.encoding.encoder import Encoder
from luthier.preparation.prepare import prepare
from luthier.presets import dataset_rows, model_folder, tokenizer_folder
from luthier.records import Segment
from luthier.training.fit import fit
from luthier.training.report import RunResult

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dpo.yaml"
SMALL = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 24}
ENOUGH = 0.9


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the example has it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights and the preset tokenizer, in one folder."""
    folder = tmp_path_factory.mktemp("beginning")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_folder("tiny-qwen3"), **SMALL)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in tokenizer_folder("tiny").iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture(scope="module")
def run(beginning: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("run")
    config = load_config(
        EXAMPLE,
        [
            f"model.name_or_path={beginning}", f"output.dir={folder / 'out'}", f"data.store={folder / 'store'}",
            "data.workers=0", "data.max_length=128", "train.max_steps=110", "train.learning_rate=3e-3",
            "objective.sft_weight=0", "eval.generate_rows=4", "eval.max_new_tokens=3", "output.save_strategy=no",
            "tracking.progress=false", "runtime.device=cpu",
        ],
    )  # fmt: skip
    encoder = Encoder.from_config(config)
    return fit(config, encoder, prepare(config, encoder))


@pytest.fixture(scope="module")
def pairs(beginning: Path) -> list[list[Segment]]:
    """The chosen and the rejected answer of every held-out row, each behind its prompt."""
    tokenizer = luthier.load_tokenizer(beginning)
    samples = luthier.encode_many(dataset_rows("preferences", "test"), tokenizer, objective="dpo")
    return [sample.segments() for sample in samples if isinstance(sample, luthier.Sample)]


def log_probabilities(folder: Path, pairs: list[list[Segment]]) -> NDArray[np.float64]:
    """[pairs, 2]: of each answer, by the model's own attention and head, padded and in no pack."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    segments = [segment for pair in pairs for segment in pair]
    found = [_log_probabilities(model, segments[start : start + 72]) for start in range(0, len(segments), 72)]
    return np.concatenate(found).reshape(len(pairs), 2)


@torch.no_grad()
def _log_probabilities(model: PreTrainedModel, segments: list[Segment]) -> NDArray[np.float64]:
    def padded(arrays: list[NDArray[Any]]) -> torch.Tensor:
        tensors = [torch.from_numpy(array.astype(np.int64)) for array in arrays]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)  # what follows does not reach back

    ids_BT = padded([segment.input_ids for segment in segments])
    target_BT = padded([segment.target for segment in segments])
    logps_BTV = model(input_ids=ids_BT).logits[:, :-1].log_softmax(dim=-1)
    logps_BT = logps_BTV.gather(2, ids_BT[:, 1:, None])[:, :, 0]
    return (logps_BT * target_BT[:, 1:]).sum(dim=1).double().numpy()


def ranked_right(scores_P2: NDArray[np.float64]) -> float:
    return float((scores_P2[:, 0] > scores_P2[:, 1]).mean())


def test_held_out_pairs_are_ranked_as_their_rows_do(
    run: RunResult, beginning: Path, pairs: list[list[Segment]]
) -> None:
    before, after = (log_probabilities(folder, pairs) for folder in (beginning, run.path / "model"))
    assert len(pairs) == 216
    assert 0.3 < ranked_right(before) < 0.7, "the measure finds nothing where nothing was learned"
    assert ranked_right(after - before) >= ENOUGH
    # what the run says of itself is what the saved model does
    assert run.evals[-1].accuracy == pytest.approx(ranked_right(after - before), abs=2.5 / len(pairs))
    beta = run.config["objective"]["beta"]
    assert run.evals[-1].measures["rewards/margins"] == pytest.approx(
        beta * np.mean((after - before) @ np.array([1.0, -1.0])), rel=1e-3
    )


def test_the_answers_expected_of_held_out_rows_are_the_chosen_ones(run: RunResult) -> None:
    chosen = [row["chosen"][0]["content"] for row in dataset_rows("preferences", "test")]
    assert [record.expected for record in run.generations[0].records] == chosen[:4]
