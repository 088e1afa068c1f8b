"""Pieces become token trees: texts to ids, media to the tokens that stand for them.

Here is the Python interface: rows in any supported form become samples, under a tokenizer or a run description.

tokenizer = luthier.load_tokenizer("path/to/model")
sample = luthier.encode({"messages": […]}, tokenizer)
for input_ids, target in sample.unroll(): …
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, cast

import msgspec

from luthier.config.inputs import SourceConfig, TemplateConfig
from luthier.config.loading import RunDescription, load_draft, load_sections
from luthier.config.objective import kind_of
from luthier.encoding.encoder import Encoder, encode_rows, target_policy
from luthier.encoding.measuring import Measurer
from luthier.encoding.pieces import Assembler
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import RowError
from luthier.media.families.table import decoder_of
from luthier.media.files import MediaAccess
from luthier.media.processors.processor import MediaProcessor
from luthier.records import Address, Conversation, Document, Message, Row, Sample, Tokenized
from luthier.rendering.render import Renderer
from luthier.rendering.template import ChatTemplate
from luthier.sources import RawRow
from luthier.sources.detect import detect_layout
from luthier.sources.formats import offered_tools
from luthier.sources.source import RowReader

Tools = Sequence[Mapping[str, object]]
Control = Literal["as_text", "forbid"] | Sequence[str]

ROWS = "<rows>"  # the file of rows that come from Python


class EncodeOptions(TypedDict, total=False):
    """What rows are encoded under; all but ``tools`` and ``control`` as in the section ``template`` of a run.

    train_on         ``assistant`` (default), ``last_assistant``, ``all``, ``completion`` or ``none``
    targets          rules that refine it, as dicts: ``{"part": "thinking", "train": False}``
    train_stop       learn the stop token too (default)
    history          ``inference`` (default) or ``one_rendering``
    tools            offered where a row has none of its own, in any form that a row may have them in
    template_kwargs  variables for the chat template, beside those that the tokenizer was loaded with
    control          control strings in the rows' own text: ``as_text`` (default), ``forbid``, or a list of those that
                     are meant as control tokens
    objective        which rows are taken: those that this objective learns from; ``sft`` is the default
    processor        transformers' processor of a multimodal model, for rows with media
    media            what rows may open and how the processor sees it, as in the section ``media`` of a run
    """

    train_on: str
    targets: Sequence[Mapping[str, Any]]
    train_stop: bool
    history: str
    tools: Tools | None
    template_kwargs: Mapping[str, Any] | None
    control: Control
    objective: str
    processor: Any
    media: Mapping[str, Any]


def encode(
    row: Mapping[str, object] | Row, tokenizer: Tokenizer | RunDescription, **options: Unpack[EncodeOptions]
) -> Sample:
    """The token tree of one row, under `EncodeOptions`, or as the run encodes it whose description is given instead of
    a tokenizer (a path, a dict or a `RunConfig`).

    ``row`` is a dict in any supported form (OpenAI messages, ShareGPT, alpaca, prompt and completion, text) or a
    record such as `Conversation`.

    Raises `RowError` if the row cannot be trained on as inference would see it, `RowDropped` if nothing in it is a
    target, `SourceError` if its form is not recognised, `TemplateError` for variables that the template does not read.
    """
    (sample,) = encode_many([row], tokenizer, **options)
    return cast(Sample, sample)


def encode_many(
    rows: Iterable[Mapping[str, object] | Row],
    tokenizer: Tokenizer | RunDescription,
    *,
    errors: Literal["raise", "return"] = "raise",
    **options: Unpack[EncodeOptions],
) -> Iterator[Sample | RowError]:
    """The token trees of many rows, in order; far quicker than one by one. See `encode` and `EncodeOptions`.

    Dicts of several forms may be mixed. ``errors="return"`` gives a `RowError` in the place of a row that cannot be
    encoded, and goes on; its address is ``<rows>:N``, counted from 1.

    A run description says all that `EncodeOptions` say. It is read anew in each call, so give it many rows at once.
    """
    if errors not in ("raise", "return"):
        raise TypeError(f"errors is 'raise' or 'return', not {errors!r}")
    if unknown := options.keys() - EncodeOptions.__annotations__.keys():
        raise TypeError(
            f"no such option: {', '.join(sorted(unknown))}; there are {', '.join(EncodeOptions.__annotations__)}"
        )
    machinery = _of_options(tokenizer, options) if isinstance(tokenizer, Tokenizer) else _of_run(tokenizer, options)
    for outcome in machinery(_records(rows, offered_tools(options.get("tools")))):
        if isinstance(outcome, RowError) and errors == "raise":
            raise outcome
        yield outcome


def encode_prompt(
    messages: Sequence[Mapping[str, object] | Message] | Conversation,
    tokenizer: Tokenizer | RunDescription,
    *,
    tools: Tools | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    processor: Any = None,
    media: Mapping[str, Any] | None = None,
    control: Control = "as_text",
) -> Sample:
    """The generation prompt of a history: a sample whose ``input_ids``, int32[T], are what the model is shown before
    its next answer, made as training makes the ids before an answer that it learns. None of them is a target.

    ``messages`` are dicts or `Message` records, as of a row that ends before the answer; a `Conversation` brings its
    own tools. The options are those of `EncodeOptions`; of ``media`` and ``processor`` the items in the prompt are
    expanded as in training, and named in the sample's ``media``. With a run description in place of the tokenizer the
    run says all but the tools.

    A template's thinking switch that ``template_kwargs`` leave open is left open, as inference does. Training shows an
    answer without a thought the prompt of ``enable_thinking: false`` where the open one begins a thought.

    Raises `RowError` for a history that training refuses, for the same reason; `TemplateError` for variables that the
    template does not read; `SourceError` where the messages have no known form.
    """
    options = {"template_kwargs": template_kwargs, "processor": processor, "media": media}
    given = EncodeOptions(**{name: value for name, value in options.items() if value is not None})  # type: ignore[typeddict-item]
    if control != "as_text":
        given["control"] = control
    machinery = _of_options(tokenizer, given) if isinstance(tokenizer, Tokenizer) else _of_run(tokenizer, given)
    (record,) = _records([_history(messages)], offered_tools(tools))
    outcome = record if isinstance(record, RowError) else next(machinery([as_prompt(record)]))
    if isinstance(outcome, RowError):
        raise outcome
    return outcome


def _history(messages: Sequence[Mapping[str, object] | Message] | Conversation) -> Mapping[str, object] | Row:
    if isinstance(messages, Conversation):
        return messages
    if messages and all(isinstance(message, Message) for message in messages):
        return Conversation(messages=cast("tuple[Message, ...]", tuple(messages)), address=Address(file=ROWS, row=1))
    return {"messages": list(messages)}


def as_prompt(row: Row) -> Conversation:
    """A conversation as a history that is to be answered. Raises `RowError` for rows without turns."""
    if not isinstance(row, Conversation):
        kind = type(row).__name__.lower()
        raise RowError("objective", f"a row of kind {kind} has no turns, so no answer follows it", address=row.address)
    return replace(row, add_generation_prompt=True, continue_final_message=False)


_Machinery = Callable[[Iterable[Row | RowError]], Iterator[Sample | RowError]]


def _of_run(description: RunDescription, options: EncodeOptions) -> _Machinery:
    """What encodes the rows of a run."""
    if said := options.keys() - {"tools"}:
        raise TypeError(
            f"{', '.join(sorted(said))}: these are options beside a tokenizer; the run description has them"
        )
    draft = load_draft(description)
    with draft.placing():
        return Encoder.from_config(draft.config).encode_many


def _of_options(tokenizer: Tokenizer, options: EncodeOptions) -> _Machinery:
    """What encodes under these options, with all the recordings it has made. Raises `ConfigError`."""
    kwargs, processor = options.get("template_kwargs") or {}, options.get("processor")
    said = {name: value for name, value in options.items() if name not in ("tools", "processor")}
    # the processor itself, not what it holds: its class need not be able to compare
    key = (msgspec.json.encode(said, enc_hook=str, order="deterministic"), id(processor))
    known: dict[Any, _Machinery] = tokenizer.kept  # which goes with it: what encodes holds the tokenizer itself
    if key not in known:
        kind = kind_of(options.get("objective", "sft"))
        template = {name: value for name, value in said.items() if name in TemplateConfig.model_fields}
        config = load_sections(template=template, media=options.get("media") or {})
        policy = target_policy(config.template, tokenizer, kind)
        measurer = Measurer(
            lambda: None if processor is None else MediaProcessor.of(processor, config.media),
            MediaAccess(config.media),
            one_each=decoder_of(tokenizer.files.processor_class) is not None,
        )
        renderer = Renderer(template_under(tokenizer, kwargs), tokenizer.control, policy, slots=measurer.slots)
        known[key] = partial(encode_rows, renderer=renderer, assembler=Assembler(tokenizer), measurer=measurer)
    return known[key]


def template_under(tokenizer: Tokenizer, kwargs: Mapping[str, object]) -> ChatTemplate | None:
    """The tokenizer's chat template with more variables. Raises `TemplateError` for one that it does not read."""
    template = tokenizer.template
    if template is None or not kwargs:
        return template
    tokenizer.require_variables(kwargs, "template_kwargs")
    return template.changed(kwargs={**template.kwargs, **kwargs})


def _records(
    rows: Iterable[Mapping[str, object] | Row], tools: tuple[Mapping[str, object], ...]
) -> Iterator[Row | RowError]:
    readers: dict[tuple[str, ...], RowReader] = {}  # one for each set of keys, since rows of several forms may come
    for number, row in enumerate(rows, start=1):
        if isinstance(row, Mapping):
            try:
                record = _record(row, Address(file=ROWS, row=number), readers)
            except RowError as error:
                yield error
                continue
        elif isinstance(row, Row):
            record = row
        else:
            raise TypeError(
                f"row {number} is a {type(row).__name__}; a row is a dict, or a record such as Conversation"
            )
        if tools and not isinstance(record, Document | Tokenized) and not record.tools:
            record = replace(record, tools=tools)
        yield record


def _record(row: Mapping[str, object], address: Address, readers: dict[tuple[str, ...], RowReader]) -> Row:
    keys = tuple(row)
    if keys not in readers:
        readers[keys] = RowReader(layout=detect_layout(SourceConfig(path=ROWS), [row]))
    return readers[keys].convert(RawRow(raw=b"", data=dict(row), address=address))
