"""Row in, token tree out: rendering and tokenizing under one set of options."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from luthier import encoding, rendering
from luthier.config.schema import ModelConfig, RunConfig, TemplateConfig
from luthier.encoding.pieces import encode_paths
from luthier.encoding.tokenizer import AddedTokens, Tokenizer, load_tokenizer
from luthier.encoding.tree import fold
from luthier.errors import RowDropped, RowError, TemplateError
from luthier.records import Rendered, Row, Sample
from luthier.rendering.render import Renderer
from luthier.rendering.targets import TargetPolicy


@dataclass(frozen=True)
class Encoder:
    """Encodes rows. Defined by two config sections alone, so it can be sent to a worker and rebuilt there."""

    model: ModelConfig
    options: TemplateConfig

    @classmethod
    def from_config(cls, config: RunConfig) -> Encoder:
        """The encoder of a run. Raises `TokenizerError` or `TemplateError` if it cannot be built."""
        encoder = cls(config.model, config.template)
        encoder.renderer  # noqa: B018  build it now: errors belong to the start of a run
        return encoder

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, with the run's template and added tokens."""
        return load_tokenizer(
            self.model.tokenizer_name_or_path or self.model.name_or_path,
            chat_template=self.options.chat_template,
            template_kwargs=self.options.kwargs,
            added=AddedTokens(ordinary=tuple(self.model.add_tokens), special=tuple(self.model.add_special_tokens)),
            revision=self.model.revision,
            cache_dir=self.model.cache_dir,
        )

    @cached_property
    def renderer(self) -> Renderer:
        """The renderer of this encoder's template and target policy."""
        policy = TargetPolicy(
            train_on=self.options.train_on,
            train_stop=self.options.train_stop,
            default_system=self.options.default_system,
        )
        template = self.tokenizer.template
        unknown = sorted(set(self.options.kwargs) - (template.variables if template else set()))
        if unknown:
            raise TemplateError(
                f"template.kwargs: the chat template of {self.tokenizer.files.origin} reads no variable {unknown[0]!r}",
                hint=f"it reads {', '.join(sorted(template.variables)) if template else 'nothing, there is none'}",
            )
        return Renderer(template, self.tokenizer.control, policy)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of all that decides a sample, beside the row: files, options, and the code of these rooms."""
        options = self.options.model_dump_json(exclude={"chat_template"})
        parts = [_code_version(), self.tokenizer.fingerprint, options]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def render(self, row: Row) -> Rendered:
        """The pieces of a row. Raises `RowError` with the row's address."""
        try:
            return self.renderer.render(row)
        except RowError as error:
            raise error.at(row.address) from error

    def encode(self, row: Row) -> Sample:
        """The token tree of a row.

        Raises `RowError` if the row cannot be trained on as inference would see it, `RowDropped` if nothing in it is
        a target; both carry the row's address.
        """
        rendered = self.render(row)
        try:
            sample = fold(encode_paths(rendered.paths, self.tokenizer), row.address)
        except RowError as error:
            raise error.at(row.address) from error
        if not sample.target.any():
            raise RowDropped("no_target", "no token of this row is trained", address=row.address)
        return sample

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "options": self.options}


@cache
def _code_version() -> str:
    """Digest of the source of the rooms that decide a sample: a change of code never meets samples of the old one."""
    digest = hashlib.sha256()
    files = [
        *Path(rendering.__path__[0]).glob("*.py"),
        *(Path(encoding.__path__[0]) / f"{name}.py" for name in DECIDING),
    ]
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# Modules of `encoding` that decide a sample; the others keep and count samples.
DECIDING = ("encoder", "pieces", "tokenizer", "tokenizer_files", "tree")
