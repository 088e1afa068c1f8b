"""An exported folder as one GGUF file, by llama.cpp's own converter, and its proof by llama.cpp itself.

The converter is a program of llama.cpp's and no package. It is taken from a folder of llama.cpp's, or from the source
package of llama-cpp-python, which pip fetches and compares with the digest that stands here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.check.golden import GoldenContext, GoldenPrompt, Parity, first_difference, served_otherwise
from luthier.check.verify.reference_tokenizer import TokenServer
from luthier.config.schema import ExportConfig
from luthier.errors import ModelError, UserError, install_hint
from luthier.export import llama_cpp
from luthier.export.checks import ExportCheck, ExportProof, ExportResult, HeldContext, check_result, compared, hold
from luthier.export.llama_cpp import CONTEXT, USED, known_name, llama_server
from luthier.export.proof import template_digest
from luthier.store.format import cache_folder
from luthier.writing import JsonObject, counted, rename

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
DIGEST = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SCRIPT = "convert_hf_to_gguf.py"
PARTS = (SCRIPT, "conversion/", "gguf-py/")
FETCH_TIMEOUT, CONVERT_TIMEOUT, ANSWER_TIMEOUT = 900.0, 6 * 3600.0, 300.0  # seconds
GGUF_BOUNDS = {"f32": "llama.cpp", "f16": "cast", "bf16": "cast", "q8_0": "8 bits"}  # type -> `BOUNDS`
NUM_TOLD = 100  # tokens whose probabilities are asked for at each place


def converter_folder(named: Path | None) -> Path:
    """The folder of llama.cpp's converter: the one that is named, or the one that was fetched once.

    Raises `UserError` where the named one has none, or where it cannot be fetched.
    """
    if named is not None:
        if not (named / SCRIPT).is_file():
            raise UserError(f"{named} holds no {SCRIPT}", hint="name a clone of llama.cpp")
        return named
    folder = kept_converter()
    if not (folder / SCRIPT).is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _unpack(_fetch(Path(scratch)), Path(scratch) / "unpacked")
            if not folder.exists():
                rename(Path(scratch) / "unpacked", folder)
    return folder


def kept_converter() -> Path:
    """Where the converter is kept that was fetched, whether it is there or not."""
    return cache_folder() / "llama.cpp" / DIGEST[:16]


def _fetch(scratch: Path) -> Path:
    wanted = scratch / "wanted.txt"
    wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{DIGEST}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", PACKAGE]
    command += ["--require-hashes", "--requirement", str(wanted), "--dest", str(scratch)]
    hint = "name a clone of llama.cpp: export.llama_cpp=DIR, or --llama-cpp DIR"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"pip does not fetch {PACKAGE} {VERSION} in {FETCH_TIMEOUT:g} s", hint=hint) from error
    found = list(scratch.glob("*.tar.gz"))
    if done.returncode or not found:
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise UserError(f"pip cannot fetch {PACKAGE} {VERSION}, which holds the converter: {said[:300]}", hint=hint)
    if hashlib.sha256(found[0].read_bytes()).hexdigest() != DIGEST:
        raise UserError(f"{found[0].name} does not have the expected digest", hint=hint)
    return found[0]


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            _, _, inside = member.name.partition("/vendor/llama.cpp/")
            if member.isfile() and inside.startswith(PARTS):
                member.name = inside
                tar.extract(member, folder, filter="data")


def convert(folder: Path, target: Path, section: ExportConfig, converter: Path) -> str | None:
    """Write ``target`` of an exported folder. The name by which llama.cpp was told to cut texts, where the converter
    does not know the tokenizer. Raises `ModelError` for a model that the converter does not take."""
    script, name = str(converter / SCRIPT), section.pre_tokenizer or known_name(folder)
    arguments = [str(folder), "--outfile", str(target), "--outtype", section.outtype]
    command = [sys.executable, script, *arguments]
    if name is not None:
        when = "unknown" if section.pre_tokenizer is None else "always"
        command = [sys.executable, "-m", llama_cpp.__name__, "convert", script, name, when, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERT_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"llama.cpp's converter is not done in {CONVERT_TIMEOUT:g} s") from error
    if done.returncode or not target.is_file():
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        hint = "export it without --format gguf, or name a newer llama.cpp with --llama-cpp DIR"
        if "pre-tokenizer" in said:
            hint = "say how llama.cpp is to cut texts into words, by its name for it: export.pre_tokenizer=NAME"
        raise ModelError(f"llama.cpp's converter cannot convert this model: {said[:300]}", hint=hint)
    return name if f"{USED} {name}" in done.stdout.splitlines() else None


def check_installed() -> None:
    """Raise `UserError` where what loads a GGUF file for its proof is not there."""
    if importlib.util.find_spec("xllamacpp") is None:
        hint = f"{install_hint('gguf')}; or add --no-proof"
        raise UserError("the proof of a GGUF file needs the package xllamacpp, which is not installed", hint=hint)


def prove_gguf(model: Path, parity: Parity) -> ExportProof:
    """Have llama.cpp load a file, and hold what it does against the golden cases. Raises `UserError` as
    `check_installed`."""
    check_installed()
    try:
        with llama_server(model) as url:
            return ExportProof(results=tuple(_results(url, model, parity)))
    except ModelError as error:
        return ExportProof(results=(check_result(ExportCheck.LOADS, "by llama.cpp", [(model.name, error.message)]),))


def _results(url: str, model: Path, parity: Parity) -> list[ExportResult]:
    results = [check_result(ExportCheck.LOADS, f"{model.name} by llama.cpp", [])]
    text = str(_ask(url, "/props", None).get("chat_template", ""))
    same = parity.template_sha256 in (
        template_digest(text),
        template_digest(f"{text}\n"),
    )  # Jinja drops a last line end
    faults = [] if same else [(model.name, "the chat template is not the one of training")]
    results.append(check_result(ExportCheck.TEMPLATE, "the chat template in the file", faults))
    if parity.prompts:
        served = served_otherwise(parity, TokenServer(url, timeout=ANSWER_TIMEOUT))
        results.append(check_result(ExportCheck.TOKENS, f"{counted(len(parity.prompts), 'prompt')} as served", served))
    for text, ids in parity.texts.items():
        asked = {"content": text, "add_special": False, "parse_special": False}
        found = [int(number) for number in _ask(url, "/tokenize", asked).get("tokens", [])]
        faults = [] if found == ids else [("a text of many scripts", first_difference(found, ids))]
        told = f"{counted(len(ids), 'id')} of a text, as the tokenizer cuts it into words"
        results.append(check_result(ExportCheck.TOKENS, told, faults))
    letter = [int(number) for number in _ask(url, "/tokenize", {"content": "a", "add_special": False})["tokens"]][-1]
    held = [_held(url, golden, parity, letter) for golden in parity.contexts if len(golden.ids) < CONTEXT]
    of_rows, answers = ([one for one in held if one.is_answer is kind] for kind in (False, True))
    results.append(compared(ExportCheck.LOGPROBS, of_rows, parity.bound, parity.rounding))
    results.append(compared(ExportCheck.ANSWERS, answers, parity.bound, parity.rounding))
    return results


def _held(url: str, golden: GoldenContext, parity: Parity, letter: int) -> HeldContext:
    found = [_told(url, golden.ids[:place], letter) for place in golden.places]
    size = 1 + max(max(max(ids) for ids in golden.top_ids), *(max(told) for told in found))
    found_NV = np.empty((len(found), size), np.float32)
    for row, told in zip(found_NV, found, strict=True):
        row[:] = min(told.values())  # what is not told is at most as likely as the last that is
        row[list(told)] = list(told.values())

    def logprobs_of(ids_NK: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.take_along_axis(found_NV, ids_NK, axis=1)

    return hold(golden, logprobs_of, found_NV, parity.bound)


def _told(url: str, ids: list[int], letter: int) -> dict[int, float]:
    """Log-probabilities of the likeliest tokens behind some ids. llama.cpp is made to answer with a letter, which
    changes nothing of what it tells: of a token that is half a character it tells nothing."""
    asked: JsonObject = {
        "prompt": ids,
        "n_predict": 1,
        "temperature": 0,
        "n_probs": NUM_TOLD,
        "post_sampling_probs": False,
    }
    told = _ask(url, "/completion", {**asked, "cache_prompt": True, "logit_bias": [[letter, 1e9]]})
    try:
        return {int(one["id"]): float(one["logprob"]) for one in told["completion_probabilities"][0]["top_logprobs"]}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ModelError(f"llama.cpp gives no probabilities: {json.dumps(told)[:200]}") from error


def _ask(url: str, path: str, body: JsonObject | None) -> JsonObject:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT) as response:
            found: JsonObject = json.loads(response.read())
    except (OSError, ValueError) as error:
        raise ModelError(f"llama.cpp does not answer {path}: {error}") from error
    return found


# ---- A Modelfile for Ollama beside a GGUF file.
#
# Ollama has a template language of its own: a chat template is written in it where it only puts texts around messages,
# and where that makes the ids of all golden prompts; else it is left out.

MODELFILE = "Modelfile"
RENDERED_BY_OLLAMA = ("gemma4", "nemotron_h", "laguna")  # how model types begin of which it never reads a template
ROLES = ("system", "user", "assistant")
_MARK = "zqmark"  # stands for a message's text; no template changes it


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateShape:
    """What a chat template writes before and behind each role's text, and where the answer begins."""

    before: Mapping[str, str]
    behind: Mapping[str, str]
    opening: str

    def rendered(self, messages: list[JsonObject]) -> str:
        """The prompt as Ollama makes it of the same shape: it joins messages of one role that follow each other."""
        joined = (
            (role, "\n\n".join(one["content"] for one in run))
            for role, run in groupby(messages, key=lambda one: one["role"])
        )
        return "".join(f"{self.before[role]}{text}{self.behind[role]}" for role, text in joined) + self.opening

    def in_go(self) -> str:
        """The shape in Ollama's language."""
        cases = [
            f'{"if" if number == 0 else "else if"} eq .Role "{role}" }}}}{self.before[role]}{{{{ .Content }}}}'
            f"{self.behind[role]}{{{{ "
            for number, role in enumerate(ROLES)
        ]
        return "{{ range .Messages }}{{ " + "".join(cases) + "end }}{{ end }}" + self.opening


class NotExpressible(UserError):
    """Ollama's language cannot say what this template does, or nothing shows that it does."""


def modelfile(
    model: Path, parity: Parity, tokenizer: Any, num_ctx: int, model_type: str = "", system: str | None = None
) -> tuple[str, list[str]]:
    """The text of a Modelfile for a GGUF file beside it, and what is to be told. ``tokenizer`` is transformers',
    ``model_type`` the name of its model's family, ``system`` what training told conversations without a system message.
    """
    lines = [f"FROM ./{model.name}"]
    for stop in parity.stops:
        text = str(tokenizer.convert_ids_to_tokens(stop))
        if '"' not in text and text.isprintable():
            lines.append(f'PARAMETER stop "{text}"')
    lines.append(f"PARAMETER num_ctx {num_ctx}")
    left = []
    if system is not None and ('"""' in system or system.endswith('"')):
        left.append(f"{MODELFILE} has no SYSTEM: Ollama cannot read its quotation marks")
    elif system is not None:
        lines.append(f'SYSTEM """{system}"""')
    if model_type.startswith(RENDERED_BY_OLLAMA):
        note = (
            f"{MODELFILE} has no TEMPLATE: Ollama writes prompts of {model_type} by its own code, whatever a file says"
        )
        return "\n".join(lines) + "\n", [*left, f"{note}; llama-server --jinja uses the template that was trained with"]
    try:
        shape = proven_shape(parity, tokenizer)
    except NotExpressible as error:
        note = f"{MODELFILE} has no TEMPLATE ({error.message}): see docs/export.md, Ollama, for what Ollama does then"
        return "\n".join(lines) + "\n", [*left, note]
    proven = counted(len(parity.prompts), "golden prompt")
    note = f"{MODELFILE} has a TEMPLATE, which makes the ids of {proven}, all that there are"
    return "\n".join([*lines, f'TEMPLATE """{shape.in_go()}"""']) + "\n", [*left, note]


def proven_shape(parity: Parity, tokenizer: Any) -> TemplateShape:
    """The shape of the chat template, which makes the ids of every golden prompt. Raises `NotExpressible`."""
    if not parity.prompts:
        raise NotExpressible("there are no golden prompts to prove it on")
    shape = _shape(parity, tokenizer)
    texts = (*shape.before.values(), *shape.behind.values(), shape.opening)
    if any("{{" in text or "}}" in text or text.endswith("{") or '"""' in text for text in texts):
        raise NotExpressible("the chat template writes braces or quotes that Ollama reads as its own")
    if not "".join(texts).translate(dict.fromkeys(map(ord, "\n\r\t"))).isprintable():
        raise NotExpressible("the chat template writes characters that Ollama drops as it reads a Modelfile")
    first = tokenizer.bos_token
    if first and any(text.startswith(first) for text in texts):
        raise NotExpressible(f"the chat template writes the begin token {first}, which Ollama adds once more")
    for golden in parity.prompts:
        _check(golden, shape, tokenizer)
    return shape


def _shape(parity: Parity, tokenizer: Any) -> TemplateShape:
    """Read off a conversation of all roles, in which each text is a mark, and off a question alone."""
    messages = [{"role": role, "content": f"{_MARK}{number}"} for number, role in enumerate((*ROLES, "user"))]
    kwargs = parity.template_kwargs
    try:
        asked = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs))
        ended = str(tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))
        alone = str(tokenizer.apply_chat_template(messages[-1:], tokenize=False, **kwargs))
    except Exception as error:
        raise NotExpressible("the chat template refuses a conversation of all roles") from error
    pieces, (before_user, *_) = re.split(rf"{_MARK}\d", ended), re.split(rf"{_MARK}\d", alone)
    more = NotExpressible("the chat template does more than to put texts around messages")
    if len(pieces) != len(messages) + 1 or not asked.startswith(ended):
        raise more
    before_system, system_to_user, user_to_assistant, assistant_to_user, behind_user = pieces
    is_alike = system_to_user.endswith(before_user) and assistant_to_user.endswith(before_user)
    if not is_alike or not user_to_assistant.startswith(behind_user):
        raise more
    return TemplateShape(
        before={"system": before_system, "user": before_user, "assistant": user_to_assistant[len(behind_user) :]},
        behind={
            "system": system_to_user.removesuffix(before_user),
            "user": behind_user,
            "assistant": assistant_to_user.removesuffix(before_user),
        },
        opening=asked[len(ended) :],
    )


def _check(golden: GoldenPrompt, shape: TemplateShape, tokenizer: Any) -> None:
    """Raise `NotExpressible` for a prompt that the shape does not make."""
    plain = not golden.tools and all(
        set(message) <= {"role", "content"} and message["role"] in ROLES and isinstance(message["content"], str)
        for message in golden.messages
    )
    if not plain:
        raise NotExpressible(f"the golden prompt of {golden.row} has tools, thoughts or parts")
    ids = tokenizer(shape.rendered(golden.messages), add_special_tokens=False)["input_ids"]
    if list(ids) != golden.ids:
        raise NotExpressible(f"it makes other ids of the golden prompt of {golden.row}")
