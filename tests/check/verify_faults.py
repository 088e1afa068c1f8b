"""Faults that fine-tuning tools are known for, planted into right samples: each must be found by the check named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from verify_cases import (
    AT,
    DOCUMENT,
    FORGERY,
    PLAIN,
    SEAM,
    THINKING,
    TOOLS,
    WEATHER,
    chat,
    encoder,
    first_target,
    last_target,
    message,
    one_run,
    retargeted,
    spliced,
)  # fmt: skip

from luthier.check.verify import Check
from luthier.check.verify.plain_template import ReferenceFiles
from luthier.check.verify.reference_tokenizer import ReferenceTokenizer
from luthier.encoding.encoder import Encoder
from luthier.records import Branch, Conversation, Sample, ToolCall

Corrupt = Callable[[Sample, Encoder], Sample]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``corrupt`` gets the right sample of ``row`` and the encoder; ``options`` are the run's template section."""

    name: str
    row: str
    corrupt: Corrupt
    found_by: Check
    options: dict[str, Any]

    def __str__(self) -> str:
        return self.name


FAULTS: list[Fault] = []


def fault(row: str, found_by: Check, **options: Any) -> Callable[[Corrupt], Corrupt]:
    def register(corrupt: Corrupt) -> Corrupt:
        name = corrupt.__name__
        FAULTS.append(Fault(name=name, row=row, corrupt=corrupt, found_by=found_by, options=options))
        return corrupt

    return register


# ------------------------------------------------------------------------------------------------------ the mask


@fault("plain", Check.NOTHING_SUPPLIED_TRAINED)
def mask_one_too_early(sample: Sample, encoder: Encoder) -> Sample:
    return replace(sample, target=np.roll(sample.target, -1))


@fault("plain", Check.COMPLETION_TOKENS)
def mask_one_too_late(sample: Sample, encoder: Encoder) -> Sample:
    return replace(sample, target=np.roll(sample.target, 1))


@fault("plain", Check.STOP_TRAINED)
def stop_is_context(sample: Sample, encoder: Encoder) -> Sample:
    return retargeted(sample, np.isin(sample.input_ids, encoder.tokenizer.stop_token_ids), False)


@fault("plain", Check.STOP_TRAINED, train_stop=False)
def stop_is_learned_though_switched_off(sample: Sample, encoder: Encoder) -> Sample:
    return retargeted(sample, last_target(sample) + 1, True)


@fault("plain", Check.STOP_TRAINED)
def last_answer_has_no_stop(sample: Sample, encoder: Encoder) -> Sample:
    return spliced(sample, last_target(sample), len(sample.input_ids), [])


@fault("plain", Check.COMPLETION_TOKENS)
def cut_answer_is_trained_to_stop(sample: Sample, encoder: Encoder) -> Sample:
    end = last_target(sample)  # the last words are gone, and the stop is learned behind the rest
    return spliced(sample, end - 4, end, [])


@fault("plain", Check.COMPLETION_TOKENS)
def cut_answer_without_stop(sample: Sample, encoder: Encoder) -> Sample:
    return spliced(sample, last_target(sample) - 3, len(sample.input_ids), [])


@fault("plain", Check.NOTHING_SUPPLIED_TRAINED)
def question_is_learned(sample: Sample, encoder: Encoder) -> Sample:
    (words,) = encoder.tokenizer.encode_runs(["hi there"])
    start = next(i for i in range(len(sample.input_ids)) if np.array_equal(sample.input_ids[i : i + len(words)], words))
    return retargeted(sample, slice(start, start + len(words)), True)


@fault("plain", Check.NOTHING_SUPPLIED_TRAINED)
def header_is_learned(sample: Sample, encoder: Encoder) -> Sample:
    return retargeted(sample, slice(first_target(sample) - 3, first_target(sample)), True)


@fault("plain", Check.NOTHING_SUPPLIED_TRAINED)
def stop_is_taught_as_the_next_turns_first_token(sample: Sample, encoder: Encoder) -> Sample:
    return retargeted(sample, last_target(sample) + 1, True)


@fault("plain", Check.NOTHING_SUPPLIED_TRAINED)
def everything_is_learned(sample: Sample, encoder: Encoder) -> Sample:
    return retargeted(sample, slice(None), True)


@fault("plain", Check.NOTHING_SUPPLIED_TRAINED, kwargs={"enable_thinking": False})
def thinking_block_of_the_prompt_is_learned(sample: Sample, encoder: Encoder) -> Sample:
    opened = int(np.flatnonzero(sample.input_ids == encoder.tokenizer.control_id("<think>"))[0])
    return retargeted(sample, slice(opened, first_target(sample)), True)


@fault("plain", Check.COMPLETION_TOKENS)
def brackets_of_the_answer_are_lost_by_a_diff(sample: Sample, encoder: Encoder) -> Sample:
    targets = np.flatnonzero(sample.target)
    start = next(i for i in targets if "[" in encoder.tokenizer.decode([sample.input_ids[i]]))
    return retargeted(sample, start, False)


@fault("plain", Check.COMPLETION_TOKENS)
def only_the_last_turn_is_learned(sample: Sample, encoder: Encoder) -> Sample:
    return Encoder(encoder.model, encoder.options.model_copy(update={"train_on": "last_assistant"})).encode(
        chat(*PLAIN.messages, train_on="last_assistant")
    )


@fault("plain", Check.HAS_TARGETS)
def nothing_is_learned(sample: Sample, encoder: Encoder) -> Sample:
    return retargeted(sample, slice(None), False)


@fault("plain", Check.NOTHING_SUPPLIED_TRAINED, train_on="last_assistant")
def earlier_turns_are_learned_against_the_policy(sample: Sample, encoder: Encoder) -> Sample:
    return Encoder(encoder.model, encoder.options.model_copy(update={"train_on": "assistant"})).encode(
        chat(*PLAIN.messages, train_on="assistant")
    )


# --------------------------------------------------------------------------------------------- context and answer


@fault("plain", Check.PROMPT_TOKENS)
def system_prompt_is_lost(sample: Sample, encoder: Encoder) -> Sample:
    return encoder.encode(chat(*PLAIN.messages[1:]))


@fault("tools", Check.PROMPT_TOKENS, default_system="You are kind.")
def default_system_prompt_is_another(sample: Sample, other: Encoder) -> Sample:
    return encoder(default_system="You are a helpful assistant.").encode(TOOLS)


@fault("plain", Check.PROMPT_TOKENS, kwargs={"enable_thinking": False})
def template_kwargs_are_ignored(sample: Sample, other: Encoder) -> Sample:
    return encoder().encode(chat(*PLAIN.messages))


@fault("thinking", Check.PROMPT_TOKENS)
def thinking_stays_in_the_history(sample: Sample, encoder: Encoder) -> Sample:
    (first, learned), (second, also) = sample.unroll()
    end = int(np.flatnonzero(learned)[-1]) + 1
    later = int(np.flatnonzero(second == encoder.tokenizer.control_id("<|im_start|>"))[2])
    return one_run([*first[:end], 10, *second[later:]], [*learned[:end], False, *also[later:]])


@fault("thinking", Check.ANSWER_DECODES)
def thinking_of_the_answer_is_lost(sample: Sample, encoder: Encoder) -> Sample:
    bare = [replace(m, parts=m.parts[1:]) if m.role == "assistant" else m for m in THINKING.messages]
    return encoder.encode(chat(*bare))


@fault("plain", Check.ANSWER_DECODES)
def answer_is_normalised(sample: Sample, encoder: Encoder) -> Sample:
    return encoder.encode(chat(*PLAIN.messages[:-1], message("assistant", "[[1,2],[3,4]]")))


@fault("plain", Check.COMPLETION_TOKENS)
def answer_is_padded_with_white_space(sample: Sample, encoder: Encoder) -> Sample:
    return encoder.encode(chat(*PLAIN.messages[:-1], message("assistant", "[[1, 2], [3, 4]]\n")))


@fault("seam", Check.PROMPT_TOKENS)
def answer_merges_with_the_prompt(sample: Sample, encoder: Encoder) -> Sample:
    template = encoder.tokenizer.template
    assert template is not None
    (ids,) = ReferenceTokenizer(ReferenceFiles.of_run(encoder)).encode([template.render(SEAM.messages)])
    num_learned = len(encoder.tokenizer.encode_runs(["foo"])[0]) + 1
    stop = int(np.flatnonzero(np.isin(ids, encoder.tokenizer.stop_token_ids))[-1])
    return one_run(ids, [stop - num_learned < i <= stop for i in range(len(ids))])


@fault("plain", Check.PROMPT_TOKENS)
def words_are_tokenized_one_by_one(sample: Sample, encoder: Encoder) -> Sample:
    (words,) = encoder.tokenizer.encode_runs(["hi there"])
    start = next(i for i in range(len(sample.input_ids)) if np.array_equal(sample.input_ids[i : i + len(words)], words))
    letters = np.concatenate(encoder.tokenizer.encode_runs(list("hi there")))
    return spliced(sample, start, start + len(words), letters.tolist())


@fault("plain", Check.STOP_TRAINED)
def another_token_ends_the_answer(sample: Sample, encoder: Encoder) -> Sample:
    end = last_target(sample)
    return spliced(sample, end, end + 1, [encoder.tokenizer.control_id("<|endoftext|>")], target=True)


@fault("plain", Check.DECODES)
def words_follow_the_last_turn(sample: Sample, encoder: Encoder) -> Sample:
    (words,) = encoder.tokenizer.encode_runs(["and more"])
    return spliced(sample, len(sample.input_ids), len(sample.input_ids), words.tolist())


@fault("tools", Check.COMPLETION_TOKENS)
def arguments_are_written_in_another_order(sample: Sample, encoder: Encoder) -> Sample:
    messages = list(TOOLS.messages)
    messages[1] = message("assistant", ToolCall(name="weather", arguments={"days": 2, "city": "Rome"}))
    return encoder.encode(Conversation(messages=tuple(messages), tools=(WEATHER,), address=AT))


@fault("tools", Check.ANSWER_DECODES)
def arguments_are_written_twice_over(sample: Sample, encoder: Encoder) -> Sample:
    messages = list(TOOLS.messages)
    messages[1] = message("assistant", ToolCall(name="weather", arguments={"city": "Rom", "days": "2"}))
    return encoder.encode(Conversation(messages=tuple(messages), tools=(WEATHER,), address=AT))


@fault("tools", Check.PROMPT_TOKENS)
def tools_are_not_declared(sample: Sample, encoder: Encoder) -> Sample:
    return encoder.encode(Conversation(messages=TOOLS.messages, address=AT))


# ------------------------------------------------------------------------------------------------ control tokens


@fault("hostile", Check.NO_FORGED_CONTROL)
def user_text_becomes_control_tokens(sample: Sample, encoder: Encoder) -> Sample:
    (text,) = encoder.tokenizer.encode_runs([f"user\n{FORGERY}"])
    (forged,) = ReferenceTokenizer(ReferenceFiles.of_run(encoder)).encode([f"user\n{FORGERY}"])
    start = 1
    assert np.array_equal(sample.input_ids[start : start + len(text)], text)
    return spliced(sample, start, start + len(text), forged.tolist())


@fault("document", Check.NO_FORGED_CONTROL)
def words_of_a_document_become_control_tokens(sample: Sample, encoder: Encoder) -> Sample:
    (ids,) = ReferenceTokenizer(ReferenceFiles.of_run(encoder)).encode([DOCUMENT.parts[0].text + "<|im_end|>"])
    return one_run(ids, [True] * len(ids))


@fault("hostile", Check.PROMPT_TOKENS)
def user_text_is_altered_to_be_safe(sample: Sample, encoder: Encoder) -> Sample:
    safe = FORGERY.replace("<|im_end|>", "<|im\u200b_end|>").replace("<|im_start|>", "<|im\u200b_start|>")
    return encoder.encode(chat(message("user", safe), message("assistant", "No.")))


@fault("tools", Check.NO_FORGED_CONTROL)
def the_templates_control_tokens_become_text(sample: Sample, encoder: Encoder) -> Sample:
    place = int(np.flatnonzero(sample.input_ids == encoder.tokenizer.control_id("<tool_call>"))[0])
    (text,) = encoder.tokenizer.encode_runs(["<tool_call>"])
    return spliced(sample, place, place + 1, text.tolist(), target=True)


# -------------------------------------------------------------------------------------- the sample by itself


@fault("thinking", Check.PROMPT_TOKENS)
def branch_hangs_at_another_parent(sample: Sample, encoder: Encoder) -> Sample:
    assert len(sample.branches) == 3
    return replace(sample, branches=(*sample.branches[:2], replace(sample.branches[2], parent=1)))


@fault("thinking", Check.BRANCHES)
def branch_is_its_own_parent(sample: Sample, encoder: Encoder) -> Sample:
    return replace(sample, branches=(*sample.branches[:2], replace(sample.branches[2], parent=2)))


@fault("plain", Check.BRANCHES)
def branches_do_not_cover_the_tokens(sample: Sample, encoder: Encoder) -> Sample:
    return replace(sample, branches=(Branch(parent=-1, length=len(sample.input_ids) - 1),))


@fault("plain", Check.BRANCHES)
def answers_are_learned_twice(sample: Sample, encoder: Encoder) -> Sample:
    return replace(
        sample,
        input_ids=np.concatenate([sample.input_ids, sample.input_ids]),
        target=np.concatenate([sample.target, sample.target]),
        branches=(*sample.branches, *sample.branches),
    )


@fault("plain", Check.FINITE_WEIGHTS)
def targets_weigh_nothing(sample: Sample, encoder: Encoder) -> Sample:
    return replace(sample, weight=np.zeros(len(sample.input_ids), dtype=np.float32))


@fault("plain", Check.FINITE_WEIGHTS)
def a_weight_is_no_number(sample: Sample, encoder: Encoder) -> Sample:
    weight = np.ones(len(sample.input_ids), dtype=np.float32)
    weight[last_target(sample)] = np.nan
    return replace(sample, weight=weight)


@fault("plain", Check.FINITE_WEIGHTS)
def weights_are_not_the_rows(sample: Sample, encoder: Encoder) -> Sample:
    return replace(sample, weight=np.full(len(sample.input_ids), 0.5, dtype=np.float32))


@fault("plain", Check.IDS_IN_VOCABULARY)
def an_id_is_beyond_the_vocabulary(sample: Sample, encoder: Encoder) -> Sample:
    return spliced(sample, 3, 4, [encoder.tokenizer.vocab_size + 5])


@fault("plain", Check.IDS_IN_VOCABULARY)
def an_id_is_negative(sample: Sample, encoder: Encoder) -> Sample:
    return spliced(sample, 3, 4, [-100])


# ------------------------------------------------------------------------------------------------ rows mixed up


@fault("plain", Check.PROMPT_TOKENS)
def tokens_are_another_rows(sample: Sample, encoder: Encoder) -> Sample:
    return encoder.encode(chat(message("user", "who is it"), message("assistant", "It is I.")))


@fault("plain", Check.COMPLETION_TOKENS)
def a_replay_fills_in_another_rows_answer(sample: Sample, encoder: Encoder) -> Sample:
    return encoder.encode(chat(*PLAIN.messages[:-1], message("assistant", "[[5, 6], [7, 8]]")))


@fault("plain", Check.PROMPT_TOKENS)
def a_replay_fills_in_another_rows_question(sample: Sample, encoder: Encoder) -> Sample:
    return encoder.encode(chat(*PLAIN.messages[:3], message("user", "good"), *PLAIN.messages[4:]))


@fault("plain", Check.COMPLETION_TOKENS)
def answers_are_swapped(sample: Sample, encoder: Encoder) -> Sample:
    system, first, second, third, fourth = PLAIN.messages
    return encoder.encode(chat(system, first, fourth, third, second))


@fault("tools", Check.PROMPT_TOKENS)
def a_tools_result_is_another(sample: Sample, encoder: Encoder) -> Sample:
    messages = list(TOOLS.messages)
    messages[2] = message("tool", '{"sky": "grey"}')
    return encoder.encode(Conversation(messages=tuple(messages), tools=(WEATHER,), address=AT))


# ------------------------------------------------------------------------------------------- ends and beginnings


@fault("plain", Check.PROMPT_TOKENS)
def the_sequence_is_cut_off_on_its_left(sample: Sample, encoder: Encoder) -> Sample:
    return spliced(sample, 0, 6, [])


@fault("plain", Check.NOTHING_SUPPLIED_TRAINED)
def a_second_end_token_is_learned(sample: Sample, encoder: Encoder) -> Sample:
    end = last_target(sample)
    return spliced(sample, end + 1, end + 1, [int(sample.input_ids[end])], target=True)


@fault("plain", Check.COMPLETION_TOKENS)
def the_first_word_of_an_answer_is_context(sample: Sample, encoder: Encoder) -> Sample:
    return retargeted(sample, first_target(sample), False)


@fault("plain", Check.STOP_TRAINED)
def the_stop_of_the_first_answer_is_context(sample: Sample, encoder: Encoder) -> Sample:
    stops = np.flatnonzero(np.isin(sample.input_ids, encoder.tokenizer.stop_token_ids) & sample.target)
    return retargeted(sample, stops[0], False)


@fault("plain", Check.ANSWER_DECODES)
def an_answer_is_in_lower_case(sample: Sample, encoder: Encoder) -> Sample:
    return encoder.encode(chat(*PLAIN.messages[:2], message("assistant", "hello! how are you?"), *PLAIN.messages[3:]))


@fault("plain", Check.COMPLETION_TOKENS)
def an_answer_is_said_twice(sample: Sample, encoder: Encoder) -> Sample:
    said = "Hello! How are you?" * 2
    return encoder.encode(chat(*PLAIN.messages[:2], message("assistant", said), *PLAIN.messages[3:]))


@fault("thinking", Check.NOTHING_SUPPLIED_TRAINED)
def an_earlier_answer_is_learned_again_in_the_history_of_a_later_one(sample: Sample, encoder: Encoder) -> Sample:
    history = sample.branches[0].length + sample.branches[1].length
    return retargeted(sample, history + 1, True)


@fault("tools", Check.ANSWER_DECODES)
def an_argument_of_a_call_is_another(sample: Sample, encoder: Encoder) -> Sample:
    messages = list(TOOLS.messages)
    messages[1] = message("assistant", ToolCall(name="weather", arguments={"city": "Oslo", "days": 2}))
    return encoder.encode(Conversation(messages=tuple(messages), tools=(WEATHER,), address=AT))


@fault("hostile", Check.NO_FORGED_CONTROL)
def one_end_token_is_forged_in_a_question(sample: Sample, encoder: Encoder) -> Sample:
    return spliced(sample, 4, 5, [encoder.tokenizer.control_id("<|im_end|>")])
