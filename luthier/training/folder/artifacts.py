"""Files that a run leaves for others to load: model or adapter, tokenizer, chat template, model card."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from luthier.config.inputs import ModelConfig
from luthier.config.objective import LOSSES
from luthier.config.schema import RunConfig
from luthier.encoding import tokenizer_files
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError, TokenizerError
from luthier.ledger import rows_beside
from luthier.media.processors.processor import PROCESSOR_FILES, said_options
from luthier.models.adapter_files import save_adapter
from luthier.models.model import RANDOM_WEIGHTS, source_of
from luthier.models.vocabulary import RESIZED, UNPADDED, pads_with_end
from luthier.training.report import RunResult
from luthier.writing import counted

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
GENERATION_FILE = "generation_config.json"
MODEL_CONFIG, ADAPTER_CONFIG, ADAPTER_WEIGHTS = "config.json", "adapter_config.json", "adapter_model.safetensors"
TEMPLATE_FILE, TEMPLATE_KEY = "chat_template.jinja", "chat_template"
MOST_COMPARED = 256  # of added tokens; all of a run are added alike
LOADING = "## Loading"  # a heading of an adapter's model card
TEMPLATE_HOLDERS = ("tokenizer_config.json", *PROCESSOR_FILES)  # which may hold a chat template, too


def save_model(
    model: PreTrainedModel | PeftModel,
    folder: Path,
    tokenizer: Tokenizer,
    *,
    initial: Path | None = None,
    processor: Path | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    max_shard_gb: float | None = None,
) -> None:
    """Write what ``AutoModelForCausalLM`` (or PEFT) and ``AutoTokenizer`` load from ``folder``; of a reward model
    ``AutoModelForSequenceClassification``.

    Weights are safetensors; the generation settings and the chat template that was trained with go along. ``initial``
    is the folder of `keep_initial_adapter`, for adapters that need the conversion; ``processor`` the one with the files
    of a multimodal model's processor, which are copied; ``weights`` are those of a sharded model, whole;
    ``max_shard_gb`` bounds the files of weights, where it is given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, PeftModel):
        save_adapter(model, folder, initial=initial, weights=weights)
        plain = model.get_base_model()
    else:
        sized = {} if max_shard_gb is None else {"max_shard_size": int(max_shard_gb * 10**9)}
        text, plain = model.config.get_text_config(), model
        during = text.pad_token_id
        text.pad_token_id = None if pads_with_end(model, tokenizer.stop_token_ids) else during
        model.save_pretrained(str(folder), state_dict=weights, **sized)
        text.pad_token_id = during
    # of a class with a generate of its own, too, whose settings transformers leaves out; reward models have none
    if (settings := vars(plain).get("generation_config")) is not None:
        settings.save_pretrained(str(folder))
    save_tokenizer(tokenizer, folder)
    if processor is not None:
        for name in PROCESSOR_FILES:
            if (processor / name).is_file():
                _copy_settings(processor / name, folder / name, tokenizer.files.chat_template)
                _copy_code(processor / name, folder)


def saved_stops(model: Path) -> list[int]:
    """The ids that end answers of the model in a folder, as its generation config says. Raises `ModelError`."""
    path = model / GENERATION_FILE
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return [number for number in (found if isinstance(found, list) else [found]) if number is not None and number >= 0]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Copy the tokenizer's own files, byte for byte, and code that they name; with added tokens, transformers writes
    them anew. Another chat template than the one of the run is not taken along: programs differ in which of two they
    use.

    Raises as `transformers_tokenizer`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = tokenizer.files.folder
    if tokenizer.added.ordinary or tokenizer.added.special:
        theirs = transformers_tokenizer(tokenizer)
        if tokenizer.files.chat_template is not None:
            theirs.chat_template = tokenizer.files.chat_template
        theirs.save_pretrained(str(folder))
    else:
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                _copy_settings(source / name, folder / name, tokenizer.files.chat_template)
    if (source / TOKENIZER_FILES[1]).is_file():
        _copy_code(source / TOKENIZER_FILES[1], folder)
    if tokenizer.files.chat_template is not None:
        (folder / TEMPLATE_FILE).write_text(tokenizer.files.chat_template, encoding="utf-8")


def _copy_settings(source: Path, target: Path, chat_template: str | None) -> None:
    """Copy a JSON file byte for byte, or without its chat template where the run has another one."""
    if chat_template is not None and source.name in TEMPLATE_HOLDERS:
        said = json.loads(source.read_text(encoding="utf-8"))
        if said.pop(TEMPLATE_KEY, chat_template) != chat_template:
            target.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            return
    shutil.copyfile(source, target)


def _copy_code(source: Path, folder: Path) -> None:
    """Copy the modules that a JSON file names for its classes (``auto_map``), and those that they import, where they
    lie beside it: the file is of no use without them."""
    named = json.loads(source.read_text(encoding="utf-8")).get("auto_map", {})
    references = [each for value in named.values() for each in ([value] if isinstance(value, str) else value) if each]
    for reference in references:
        module = source.parent / f"{reference.partition('.')[0]}.py"  # "owner/name--module.Class" is no file here
        if module.is_file():
            for code in (module, *map(Path, get_relative_import_files(str(module)))):
                shutil.copyfile(code, folder / code.name)


def transformers_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    """The run's tokenizer as an object of transformers, with the added tokens and the template of the run.

    Raises `TokenizerError` if transformers gave an added token another id than the run trained with, or finds it in
    other texts.
    """
    theirs = plain_tokenizer(tokenizer.files.folder)
    added = tokenizer.added_tokens  # as objects: of a text transformers would make a token that is normalized
    theirs.add_tokens([token for token in added if not token.special])
    theirs.add_tokens([token for token in added if token.special], special_tokens=True)
    for token in map(str, added):
        number = theirs.convert_tokens_to_ids(token)
        if tokenizer.token(number) != token:
            raise TokenizerError(
                f"added token {token!r} is id {number} in transformers; "
                f"in this run that id is {tokenizer.token(number)!r}"
            )
    _compare_encodings(tokenizer, theirs, list(map(str, added)))
    return theirs


def _compare_encodings(tokenizer: Tokenizer, theirs: PreTrainedTokenizerBase, added: Sequence[str]) -> None:
    """Raise `TokenizerError` where added tokens are found in a text by one of the two and not by the other."""
    for token in added[:MOST_COMPARED]:
        forms = [unicodedata.normalize(form, token) for form in ("NFC", "NFD", "NFKC")]
        text = "\n".join(f"{form} a{form}b  {form}, {form}{form}" for form in (*forms, token.upper(), token.lower()))
        ours = tokenizer.encode_whole(text).tolist()
        if (other := theirs.encode(text, add_special_tokens=False)) != ours:
            place = next(n for n, pair in enumerate(zip_longest(ours, other)) if pair[0] != pair[1])
            raise TokenizerError(
                f"with the added token {token!r} transformers encodes {text!r} otherwise than this run, from token "
                f"{place} on",
                hint="add the token to the tokenizer's own files, and name their folder in model.name_or_path or "
                "model.tokenizer_name_or_path",
            )


def plain_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder as transformers has it. One whose class comes with its files is loaded as the plain
    class for the same tokens: no code of theirs is run."""
    settings = folder / "tokenizer_config.json"
    has_code = settings.is_file() and "auto_map" in json.loads(settings.read_text(encoding="utf-8"))
    kind = PreTrainedTokenizerFast if has_code else AutoTokenizer
    # said, as transformers would otherwise ask on the terminal whether code of the model beside it may be run
    loaded: PreTrainedTokenizerBase = kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return loaded


def model_card(result: RunResult, config: RunConfig) -> str:
    """The text of ``README.md``, with the Hub's metadata block: what was trained from what, on what, how, and what was
    measured; nothing that was not."""
    is_adapter = config.adapter.type.is_beside
    base = config.model.name_or_path
    title = result.path.resolve().name
    library = "peft" if is_adapter else "transformers"
    task = _task(result, config)
    head = ["---", f"library_name: {library}", f"pipeline_tag: {task}", "tags: [luthier]"]
    if base.count("/") == 1 and not base.startswith((".", "/", "~", "preset:")) and not Path(base).exists():
        head.append(f"base_model: {base}")
    lines = [*head, "---", "", f"# {title}", "", *_intro(result, base, is_adapter=is_adapter), ""]
    if is_adapter and (way := _loading(result, config)):
        lines += [LOADING, "", *way, ""]
    for heading, rows in (
        ("Data", _data(result)),
        ("Training", _training(result, config)),
        ("Results", _results(result, config)),
    ):
        lines += [f"## {heading}", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    if given := given_beside(config):
        lines += ["## Prompts", "", *given, ""]
    lines += [
        "The held-out rows are of the same sources as the training rows unless the configuration names others; the",
        "results say nothing of other data. Nothing else was evaluated.",
        "",
    ]
    return "\n".join(lines)


def given_beside(config: RunConfig) -> list[str]:
    """What training gave to prompts and the model's files alone do not, in sentences for those who use the model."""
    kwargs, system, found = config.template.kwargs, config.template.default_system, list[str]()
    if said := json.dumps(said_options(config.media)).removeprefix("{}"):
        found.append(f"Give the processor these options, as training did; its files do not have them: `{said}`.")
    if kwargs:
        told = json.dumps(kwargs, ensure_ascii=False)
        found.append(f"Give the chat template these variables, as training did (`chat_template_kwargs`): `{told}`.")
    if system is not None:
        told = json.dumps(system, ensure_ascii=False)
        found.append(f"Send this system message where a conversation has none, as training did: `{told}`.")
    return found


def merged_card(text: str) -> str:
    """The card of an adapter as that of the whole model that it is merged into; of another model as it is."""
    text = re.sub(rf"^{LOADING}\n.*?(?=^## )", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^library_name: peft$", "library_name: transformers", text, count=1, flags=re.MULTILINE)
    said = re.compile(r"^A (\w+) adapter for (.+?), made with ", re.MULTILINE)
    return said.sub(r"\2 with a \1 adapter merged into it, made with ", text, count=1)


def _task(result: RunResult, config: RunConfig) -> str:
    """The Hub's name of what the model does, by which programs choose how to load it."""
    if not config.objective.kind.has_head:
        return "text-classification"
    known = {
        "image-text-to-text": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "any-to-any": MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    return next(
        (task for task, names in known.items() if result.model.architecture in names.values()), "text-generation"
    )


def _intro(result: RunResult, base: str, *, is_adapter: bool) -> list[str]:
    random = any(note.startswith(RANDOM_WEIGHTS) for note in result.model.notes)
    start = f"`{base}` with random weights" if random else f"`{base}`"
    what = f"A {result.adapter} adapter for {start}" if is_adapter else f"{start}, trained ({result.adapter})"
    ended = "" if result.ended == "completed" else f" Training was {result.ended.replace('_', ' ')}."
    return [f"{what}, made with Luthier {result.versions.get('luthier', '')}.{ended}"]


def _loading(result: RunResult, config: RunConfig) -> list[str]:
    """How the base is made what it was in training, where PEFT alone does not do so; nothing where it does."""
    section, kind = config.model, result.model.architecture
    rows = [note.partition(" to ")[2].split()[0] for note in result.model.notes if note.startswith(RESIZED)]
    head: dict[str, int | None] = {} if config.objective.kind.has_head else {"num_labels": 1}
    if any(note.startswith(UNPADDED) for note in result.model.notes):
        head["pad_token_id"] = None
    is_theirs = hasattr(transformers, kind)  # there is no such class of multimodal models
    if keeps_base(config) or not (section.config_overrides or rows or (head and is_theirs)):
        return []
    why = ["other settings in its config"] * bool(section.config_overrides) + ["rows for new tokens"] * bool(rows)
    why += ["a head that gives one number"] * bool(head)
    changed = {**section.config_overrides, **head}
    return [
        f"In training the base had {' and '.join(why)}, which PEFT does not know of. Load it so:",
        "",
        "```python",
        "from peft import PeftModel",
        f"from transformers import AutoConfig, PretrainedConfig, {kind}",
        "",
        f'base, adapter = {section.name_or_path!r}, "."  # the adapter is in the folder of this file',
        "settings, _ = PretrainedConfig.get_config_dict(base)",
        f"config = AutoConfig.for_model(**{{**settings, **{changed!r}}})",
        f"model = {kind}.from_pretrained(base, config=config)",
        *(f"model.resize_token_embeddings({int(count.replace(',', ''))}, mean_resizing=False)" for count in rows),
        "model = PeftModel.from_pretrained(model, adapter)",
        "```",
    ]


def _data(result: RunResult) -> list[tuple[str, str]]:
    ledger, data = result.ledger, result.train_data
    rows = []
    if ledger:
        lost = sum(ledger["dropped"].values()) + sum(ledger["quarantined"].values())
        waiting = ledger["not_yet_trained"]
        unseen = f"{waiting:,} prepared but not yet trained, " if waiting else ""
        besides = rows_beside(ledger.get("notes", {}))
        what = f"{ledger['trained']:,} trained, {unseen}{lost:,} dropped or quarantined{besides}"
        rows.append(("rows read", f"{ledger['read']:,} ({what})"))
    if drawn := result.answers:
        lost = sum(drawn["dropped"].values())
        what = f"{drawn['trained']:,} trained, {drawn['no_signal']:,} without signal, {lost:,} dropped"
        rows.append(("answers drawn", f"{drawn['sampled']:,} ({what})"))
    rows += [
        ("training sequences", f"{data.segments:,}"),
        ("training tokens", f"{data.tokens:,}, of which {data.target_tokens:,} are targets"),
    ]
    held_out = result.eval_data
    if held_out is not None:
        rows.append(("held-out sequences", f"{held_out.segments:,} ({counted(held_out.target_tokens, 'target')})"))
    return rows


def _training(result: RunResult, config: RunConfig) -> list[tuple[str, str]]:
    train = config.train
    # by the groups of weights: one number, or that of biases and norms and that of matrices
    decay = " and ".join(f"{decay:g}" for decay in result.optimizer.get("weight_decay", ()))
    rows = [
        ("parameters", f"{result.model.parameters:,} ({result.model.trainable_parameters:,} trained)"),
        ("steps", f"{result.global_step:,} ({counted(float(f'{result.epochs:.3g}'), 'epoch')})"),
        ("batch", _batch(result, config)),
        ("learning rate", f"{train.learning_rate:g}, {train.lr_scheduler_type}, warmup {train.warmup_steps:g}"),
        (
            "optimizer",
            f"{result.optimizer.get('name', train.optim)}, weight decay {decay}, "
            f"gradients clipped at {train.max_grad_norm:g}",
        ),
        ("precision", f"{result.model.precision}, weights in {result.model.dtype}"),
        *_objective(config),
        ("seed", str(config.runtime.seed)),
    ]
    if adapter := result.model.adapter:
        rows.insert(1, ("adapter", _adapter(adapter)))
    return rows


def _adapter(facts: Mapping[str, object]) -> str:
    """``LORA: r 8, lora_alpha 16, target_modules k_proj q_proj``, by the names of its adapter_config.json."""
    told = {name: value for name, value in facts.items() if name != "peft_type"}
    return f"{facts['peft_type']}: " + ", ".join(f"{name} {_plain(value)}" for name, value in told.items())


def _plain(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _batch(result: RunResult, config: RunConfig) -> str:
    """``8 packs of pairs, each answer with its prompt up to 4096 tokens``."""
    train, unit = config.train, result.unit
    count = train.per_device_train_batch_size * train.gradient_accumulation_steps * result.world_size
    what = "sequence" if unit == "target" else unit
    if train.packing.is_packed:
        what = "pack"
    tokens = train.tokens_per_step
    size = counted(count, what) if tokens is None else f"{counted(tokens, 'token')} or more, in {what}s"
    longest = f"up to {counted(config.data.max_length, 'token')}"
    if unit == "target":
        return f"{size} of {longest}"
    return f"{size}{f' of {unit}s' * train.packing.is_packed}, each answer with its prompt {longest}"


def _objective(config: RunConfig) -> list[tuple[str, str]]:
    """The loss with every number that it read, and what it was compared with."""
    objective = config.objective
    numbers = [f"{key} {number:g}" for key, number in objective.numbers.items()]
    rows = [("objective", ", ".join([f"{objective.name}, loss {objective.loss_name}", *numbers]))]
    if objective.needs_reference:
        named = objective.reference.name_or_path
        rows.append(("reference", "the model before training" if named is None else f"`{named}`"))
    elif LOSSES[objective.loss_name].reference:
        rows.append(("reference", "none"))
    return rows


def _results(result: RunResult, config: RunConfig) -> list[tuple[str, str]]:
    rows = []
    if result.final_loss is not None:
        rows.append(("training loss, last logged", f"{result.final_loss:.4f}"))
    for name, record in (("first", result.evals[:1]), ("last", result.evals[1:][-1:])):
        rows += [(f"held-out, {name} (step {e.step})", f"loss {e.loss:.4f}, {e.words}") for e in record]
    way = "" if config.generate.do_sample or config.generate.num_beams > 1 else "greedy "
    for done in result.generations:
        right = sum(record.equal for record in done.records)
        rows.append((f"{way}answers exactly right at step {done.step}", f"{right} of {len(done.records)}"))
    return rows


# --------------------------------------------------------------------------------------------------------------------
# The base of an adapter: whether it is in the run's folder, and by what it is known again where it is not.


def keeps_base(config: RunConfig) -> bool:
    """Whether a run saves the base of its adapter, in `run_folder.BASE_FOLDER`, as it is nowhere else."""
    return config.adapter.type.is_beside and (bool(config.adapter.merge_first) or source_of(config.model)[1])


WHOLE_BYTES = 64 * 2**20  # a file up to this size is read whole
SAMPLE_BYTES, MOST_SAMPLES = 16 * 2**10, 1024  # of each tensor of a larger file; of so many tensors of a file


def base_folder(section: ModelConfig) -> Path | None:
    """The folder of a model on this machine; None for one of the Hub that is not here yet."""
    source, _ = source_of(section)
    if Path(source).expanduser().is_dir():
        return Path(source).expanduser()
    with suppress(ValueError):  # no name on the Hub: a folder that is gone, of which whoever loads it tells
        found = try_to_load_from_cache(source, "config.json", cache_dir=section.cache_dir, revision=section.revision)
        return Path(found).parent if isinstance(found, str) else None
    return None


def base_files(config: RunConfig, tokenizer: Path) -> dict[str, str]:
    """By what the base of an adapter is known again; nothing where it is in the run's folder, or there is none."""
    if keeps_base(config) or not config.adapter.type.is_beside:
        return {}
    return base_digests(base_folder(config.model), tokenizer)


def base_digests(base: Path | None, tokenizer: Path) -> dict[str, str]:
    """A digest of every file that decides what a base computes, by its name: config, weights and code of ``base``, and
    what is read for a tokenizer in the folder ``tokenizer``. Empty where not all weights are there.

    Of a large file of weights the digest covers the size, the header (names, types and shapes) and a part of each
    tensor: training or merging changes these. What changes a few rows of a large tensor alone may be missed.
    """
    found = {} if base is None else model_digests(base)
    read = [path for name in tokenizer_files.FILES if (path := tokenizer / name).is_file()]
    # a name in both is the base's
    return dict(sorted(({path.name: digest_of_file(path) for path in read} | found).items())) if found else {}


def model_digests(folder: Path) -> dict[str, str]:
    """The same of a model or an adapter, without a tokenizer: its config, weights and code."""
    index, weights, config = folder / SAFE_WEIGHTS_INDEX_NAME, {SAFE_WEIGHTS_NAME}, MODEL_CONFIG
    if not (folder / SAFE_WEIGHTS_NAME).is_file() and index.is_file():
        with suppress(ValueError, KeyError, TypeError):  # whoever loads it tells what is wrong with it
            weights = set(json.loads(index.read_bytes())["weight_map"].values())
    elif (folder / ADAPTER_CONFIG).is_file() and not (folder / config).is_file():
        weights, config = {ADAPTER_WEIGHTS}, ADAPTER_CONFIG
    if not all((folder / name).is_file() for name in weights):
        return {}
    files = [folder / config, *folder.glob(tokenizer_files.CODE), *(folder / name for name in weights)]
    return {path.name: digest_of_file(path) for path in sorted(files) if path.is_file()}


def answering_digest(told: str, config: RunConfig, adapter: str | None, tokenizer: Path) -> str:
    """By what the answers of a model are told from others': ``told``, and the files of all that answers."""
    folders = [Path(name).expanduser() for name in (*config.adapter.merge_first, adapter) if name is not None]
    files = [base_digests(base_folder(config.model), tokenizer), *map(model_digests, folders)]
    return hashlib.sha256((told + json.dumps(files)).encode()).hexdigest()


def refuse_another_base(known: Mapping[str, object], section: ModelConfig, tokenizer: Path) -> None:
    """Raise `ModelError` where the files of a base are not those that are ``known`` from training. Those of a model of
    the Hub that is not here yet, and those of which nothing is known, pass."""
    found = base_digests(base_folder(section), tokenizer) if known else {}
    differing = sorted(name for name in {*found, *known} if found.get(name) != known.get(name))
    if found and differing:
        raise ModelError(
            f"{section.name_or_path} is not the base that the adapter was trained on: {', '.join(differing)} "
            f"{'is another file' if len(differing) == 1 else 'are other files'} than in training",
            hint="put those files back. A run begins anew with output.overwrite: true; to have the adapter answer on "
            "this base all the same, describe that: model: BASE, adapter: {name_or_path: RUN/model}, "
            "train: {enabled: false}",
        )


def digest_of_file(path: Path) -> str:
    """The size of a file and a hash of its bytes, or of some of them."""
    size, digest = path.stat().st_size, hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for start, length in [(0, size)] if size <= WHOLE_BYTES else _samples(path, size):
            file.seek(start)
            digest.update(file.read(length))
    return f"{size}-{digest.hexdigest()}"


def _samples(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Where to look in a large file: the header of safetensors and the middle of its tensors; else the beginning."""
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        tensors: list[list[int]] = []
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            header = json.loads(file.read(begin - 8)) if begin < size else {}
            tensors = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    yield 0, begin if tensors else WHOLE_BYTES
    for start, end in tensors[:: -(-len(tensors) // MOST_SAMPLES) or 1]:
        length = min(SAMPLE_BYTES, end - start)
        yield begin + start + (end - start - length) // 2, length
