"""Rows without any trick: trained as inference needs them, or refused for a reason that transformers confirms.

On odd templates that stand nowhere else, and on every stock and named one. The judge knows plain renders alone.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import tokenizers

from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import RowError
from luthier.presets import tokenizer_folder
from luthier.records import Sample
from tests.oracles.catalogue import catalogue
from tests.oracles.chat_rows import as_conversation
from tests.oracles.clean_chats import clean_chats
from tests.oracles.families import Stock, Stops
from tests.oracles.judged import NotTheTurn, fault_of, judge
from tests.oracles.odd_templates import GLM_LIKE, ODD, STOP, TAGS
from tests.oracles.vocabulary import encoder_of

CHATS = clean_chats()
# Families that sample a header of their own after a prompt without one: a fact of theirs that the judge does not know.
SAMPLED_HEADERS = {"trl/diffusion_gemma", "trl/muse_glimmer"}
PLAIN = 23  # conversations without thoughts and tools, which each template has to train


def odd_encoder(folder: Path, name: str) -> tuple[Stock, Encoder]:
    """An odd template on the embedded tokenizer with its tags added; its files are written to ``folder``."""
    is_glm_like = name in GLM_LIKE
    stops = Stops(eos=STOP, others=("<|user|>", "<|tool|>") if is_glm_like else ())
    stock = Stock(name=name, source=ODD[name], stops=stops, header_is_stop=is_glm_like)
    base = tokenizer_folder("tiny") / "tokenizer.json"
    whole = tokenizers.Tokenizer.from_file(str(base))
    known = {token.content for token in whole.get_added_tokens_decoder().values()}
    new = [tag for tag in TAGS if tag not in known]
    whole.add_special_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in new])
    (folder / "tokenizer.json").symlink_to(base)
    (folder / "chat_template.jinja").write_text(stock.source, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}), encoding="utf-8")
    ids = [whole.token_to_id(stop) for stop in stops.all]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    model = ModelConfig(name_or_path=str(folder), add_special_tokens=new)
    return stock, Encoder(model, TemplateConfig.model_validate({"train_on": "assistant"}))


def verdicts_of(stock: Stock, encoder: Encoder) -> Counter[str]:
    """What became of each conversation; raises `NotTheTurn` for one that is trained wrong."""
    verdicts: Counter[str] = Counter()
    rows = [as_conversation(chat, tools) for chat, tools in CHATS.values()]
    for (case, (chat, tools)), outcome in zip(CHATS.items(), encoder.encode_many(rows), strict=True):
        try:
            verdict = judge(stock, outcome, encoder.tokenizer.decode, chat, tools)
        except NotTheTurn as error:
            raise NotTheTurn(f"{stock.name}, {case}: {error}") from error
        assert verdict != "false refusal", f"{stock.name}, {case}: {outcome}"
        verdicts[verdict] += 1
    return verdicts


@pytest.mark.parametrize("name", ODD)
def test_clean_rows_are_exact_under_odd_templates_or_truly_refused(tmp_path: Path, name: str) -> None:
    verdicts = verdicts_of(*odd_encoder(tmp_path, name))
    fewest = PLAIN if name != "pairs" else 18  # which has no place for a system message, or two questions in a row
    assert verdicts["exact"] >= fewest


def test_there_are_as_many_conversations_and_odd_templates_as_is_said() -> None:
    assert len(CHATS) == 41
    assert len(ODD) >= 41


@pytest.mark.parametrize("name", sorted(name for name in catalogue() if name not in SAMPLED_HEADERS))
def test_clean_rows_are_exact_under_stock_and_named_templates_or_truly_refused(tmp_path: Path, name: str) -> None:
    stock = catalogue()[name]
    verdicts_of(stock, encoder_of(tokenizer_folder("tiny"), tmp_path, stock, train_on="assistant"))


def test_the_judge_sees_what_is_wrong_with_a_completion() -> None:
    stock = Stock(name="odd", source="", stops=Stops(eos=STOP))
    answer = {"role": "assistant", "content": "Yes."}
    thought = {**answer, "reasoning_content": "Hm."}
    right = [
        ("<|assistant|>\n", "Yes.<|end|>", answer),
        ("<|assistant|>\n<think>", "</think>Yes.<|end|>", answer),
        ("<|assistant|>\n<think></think>", "Yes.<|end|>", answer),
        ("<|assistant|>\n<think>", "Hm.</think>Yes.<|end|>", thought),
        ("<|assistant|>\n", "<think>Hm.</think>Yes.<|end|>", thought),
        ("<|assistant|>\n", "[THINK]Hm.[/THINK]Yes.<|end|>", thought),
        ("<|assistant|>\n◁think▷", "Hm.◁/think▷Yes.<|end|>", thought),
    ]
    wrong = [
        ("<|assistant|>\n", "Yes.", answer),
        ("<|assistant|>\n", "yes.<|end|>", answer),
        ("<|assistant|>\n", "Yes. Yes.<|end|>", answer),
        ("<|assistant|>\n", "Sure: Yes.<|end|>", answer),
        ("<|assistant|>\n<think></think>", "</think>Yes.<|end|>", answer),
        ("<|assistant|>\n<think>", "Yes.<|end|>", answer),
        ("<|assistant|>\n", "<think>Hm.Yes.<|end|>", thought),
        ("<|assistant|>\n", "[THINK]Hm.Yes.<|end|>", thought),
        ("<|assistant|>\n", "<think>Yes.</think>Hm.<|end|>", thought),
        ("<|assistant|>\n<think></think>", "<think>Hm.</think>Yes.<|end|>", thought),
    ]
    assert [fault_of(*case, stock) for case in right] == [None] * len(right)
    assert None not in [fault_of(*case, stock) for case in wrong]


def test_a_sample_of_another_row_is_seen(tmp_path: Path) -> None:
    stock, encoder = odd_encoder(tmp_path, "xml")
    outcome = encoder.encode(as_conversation(*CHATS["numbers"]))
    assert isinstance(outcome, Sample) and not isinstance(outcome, RowError)
    with pytest.raises(NotTheTurn):
        judge(stock, outcome, encoder.tokenizer.decode, *CHATS["one word"])
