"""``luthier serve``: a trained run behind HTTP, as OpenAI's interface has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from luthier.cli.output import JsonTarget, Output, reporting
from luthier.cli.pipeline import Overrides
from luthier.errors import UserError

if TYPE_CHECKING:
    from luthier.serve.running import Listening

WhatAnswers = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="The output.dir of a trained run, a model, or a description.", show_default=False
    ),
]
Host = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 is every network (needs a token).")
]
Port = Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0 is any that is free.")]
TokenEnv = Annotated[
    str | None, typer.Option(metavar="NAME", help="Environment variable with the token that clients must send.")
]
Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="What clients call the model; its folder's name if left.")
]


Adapters = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=RUN", help="A further run with an adapter on the same base, by a name of its own."),
]


AcceptWeights = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder whose weights a training run may have the model take."),
]


def serve(  # noqa: PLR0913
    run: WhatAnswers,
    overrides: Overrides = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token_env: TokenEnv = None,
    name: Name = None,
    adapter: Adapters = None,
    accept_weights: AcceptWeights = None,
    json: JsonTarget = None,
) -> None:
    """Answer requests over HTTP with a trained run, as OpenAI's interface has it.

    Histories are made as training made them: model or adapter, tokenizer, template
    and stop tokens are those that the run left behind. It ends with Ctrl-C.

    [dim]Example[/]   luthier serve output/quickstart
    [dim]Example[/]   luthier serve output/quickstart --port 9000 --token-env MY_TOKEN serve.max_requests=8
    """
    with reporting(json) as output:
        from luthier.serve.running import ServeOptions, token_of
        from luthier.serve.running import serve as serve_run

        options = ServeOptions(
            host=host,
            port=port,
            token=token_of(token_env),
            name=name,
            adapters=_by_name(adapter or ()),
            accept_weights=accept_weights,
        )
        serve_run(run, options, overrides=overrides or (), on_ready=lambda ready: _tell(ready, output))


def _by_name(adapters: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in adapters:
        name, equals, folder = text.partition("=")
        if not name or not equals or not folder or name in found:
            raise UserError(f"--adapter {text}: a name and a run's folder are needed, as NAME=RUN, each name once")
        found[name] = folder
    return found


def _tell(ready: Listening, output: Output) -> None:
    told = output.console.print
    told(
        f"[bold]serving[/] {escape(', '.join(ready.names))} [bold]at[/] {ready.url}/v1", highlight=False, soft_wrap=True
    )
    if ready.made:
        told(f"[bold]token[/] {ready.token} [dim](of this server alone; --token-env names one of your own)[/]",
             highlight=False, soft_wrap=True)  # fmt: skip
    output.emit({"url": ready.url, "token": ready.token if ready.made else None, "models": list(ready.names)})
