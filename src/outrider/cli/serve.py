"""`outrider serve`: target and draft in processes of the server, answering over gRPC."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider import __version__
from outrider.cli.config import ConfigOption, SetOption, load_config, setting_help
from outrider.cli.speculation_words import speculation_sentence
from outrider.config import EngineConfig
from outrider.config.sources import DEFAULT_ORIGIN, Given
from outrider.logs import setup_logging

if TYPE_CHECKING:
    from outrider.cluster.events import Event
    from outrider.links.speculation import SpeculationStatus

_NONE = "none"
_QUESTION = "The capital of France is"

app = typer.Typer(add_completion=False)


def _option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


@app.command()
def serve(
    ctx: typer.Context,
    model: Annotated[str | None, _option("--model", "-m", help=setting_help("model"))] = None,
    draft_model: Annotated[
        str | None,
        _option(
            "--draft-model",
            help="The draft, named like the target; 'none' goes without. Default: the bundled one "
            "if the target is the bundled one.",
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        _option("--tensor-parallel-size", "--tp", help=setting_help("tensor_parallel_size")),
    ] = None,
    draft_tensor_parallel_size: Annotated[
        int | None,
        _option("--draft-tensor-parallel-size", help=setting_help("draft_tensor_parallel_size")),
    ] = None,
    policy: Annotated[
        str | None,
        _option("--policy", "--speculation-policy", help=setting_help("speculation_policy")),
    ] = None,
    depth: Annotated[
        int | None,
        _option("--num-speculative-tokens", "-k", help=setting_help("num_speculative_tokens")),
    ] = None,
    host: Annotated[str | None, _option("--host", help=setting_help("host"))] = None,
    port: Annotated[int | None, _option("--port", help=setting_help("port"))] = None,
    served_model_name: Annotated[
        str | None, _option("--served-model-name", help=setting_help("served_model_name"))
    ] = None,
    no_ray: Annotated[
        bool, _option("--no-ray", help="Start the processes on this host, without Ray.")
    ] = False,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Serve a model over gRPC; the bundled pair if none is named."""
    flags = {
        "model": model,
        "draft_model": draft_model,
        "tensor_parallel_size": tensor_parallel_size,
        "draft_tensor_parallel_size": draft_tensor_parallel_size,
        "speculation_policy": policy,
        "num_speculative_tokens": depth,
        "host": host,
        "port": port,
        "served_model_name": served_model_name,
    }
    engine_config = _configure(ctx, config, assignments, flags)
    terminal = _Terminal(engine_config)
    terminal.greet()
    from outrider.cluster.serve import Watchers
    from outrider.cluster.serve import serve as run

    run(engine_config, Watchers(terminal.say, terminal.show_ready), use_ray=not no_ray)


def _configure(
    ctx: typer.Context, file: Path | None, assignments: list[str] | None, flags: dict[str, Any]
) -> EngineConfig:
    """The configuration, with the bundled draft beside the bundled target unless told otherwise."""
    from outrider.workers.weights.resolve import BUNDLED_DRAFT, BUNDLED_TARGET

    implied = {}
    if flags["draft_model"] == _NONE:
        flags |= {"draft_model": None}
        implied = {"draft.model": Given(None, "--draft-model")}
    resolved = load_config(ctx, file, assignments, flags, implied)
    config, origins = resolved.config, resolved.origins
    is_unset = origins["draft.model"] == DEFAULT_ORIGIN
    if is_unset and config.target.model == BUNDLED_TARGET and config.method is None:
        flags |= {"draft_model": BUNDLED_DRAFT}
        config = load_config(ctx, file, assignments, flags, implied).config
    if origins["log_level"] == DEFAULT_ORIGIN:
        setup_logging("warning", role="gateway")  # the terminal tells the rest
    return config


class _PatientConsole(Console):
    """Nobody needs to read it: once nothing can be written any more, it falls silent."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            self.quiet = True

    def on_broken_pipe(self) -> None:
        """In place of an end of the process."""
        self.quiet = True


class _Terminal:
    """Tells on stderr how the server fares, each line with the seconds since its start."""

    def __init__(self, config: EngineConfig) -> None:
        self._console = _PatientConsole(stderr=True, highlight=False, soft_wrap=True)
        self._config = config
        self._start_s = time.monotonic()

    def greet(self) -> None:
        target, draft = self._config.target, self._config.draft
        text = f"outrider {__version__}: {target.model}"
        if draft.model is not None:
            text += f", drafted for by {draft.model}"
        self._console.print(text, style="bold", markup=False)

    def say(self, event: Event) -> None:
        from outrider.cluster.events import Kind

        styles = {Kind.TROUBLE: "yellow", Kind.REPAIR: "green", Kind.LOG: "dim", Kind.STAGE: ""}
        if event.kind is Kind.LOG:
            self._console.print(f"           {event.text}", style="dim", markup=False)
            return
        seconds = time.monotonic() - self._start_s
        self._console.print(f"{seconds:7.1f} s  ", style="dim", end="")
        self._console.print(event.text, style=styles[event.kind], markup=False)

    def show_ready(self, address: str, speculation: SpeculationStatus | None) -> None:
        seconds = time.monotonic() - self._start_s
        self._console.print(f"ready in {seconds:.1f} s", style="bold green")
        if speculation is not None:
            reason = depth_reason(self._config)
            sentence = speculation_sentence(speculation, self._config.method, reason)
            self._console.print(sentence, markup=False)
        self._console.print("\nTry it in another terminal:\n")
        for command in commands_to_paste(address):
            self._console.print(f"    {command}", style="cyan", markup=False)
        self._console.print("\nCtrl-C stops it.")


def depth_reason(config: EngineConfig) -> str:
    """Why at most so far ahead is drafted."""
    if config.speculation.num_speculative_tokens is not None:
        return "as speculation.num_speculative_tokens says"
    return "the default of this device; --num-speculative-tokens sets another"


def commands_to_paste(address: str) -> list[str]:
    """A Python client, a chat and the status, for a server at `address`."""
    from outrider.client import DEFAULT_SERVER

    host, _, port = address.rpartition(":")
    if host in ("127.0.0.1", "0.0.0.0", "[::]", "[::1]"):
        host = "localhost"
    server = f"{host}:{port}"
    is_default = server == DEFAULT_SERVER
    python, outrider = _program("python", sys.executable), _program("outrider", sys.argv[0])
    if Path(sys.argv[0]).name != "outrider":
        outrider = f"{python} -m outrider"
    client = "Client()" if is_default else f'Client("{server}")'
    option = "" if is_default else f" --server {server}"
    return [
        f"{python} -c 'from outrider.client import Client; "
        f'print({client}.generate("{_QUESTION}", max_tokens=8, temperature=0).text)\'',
        f"{outrider} chat{option}",
        f"{outrider} status{option}",
    ]


def _program(name: str, path: str) -> str:
    """A program as it can be called from this folder: by name if that finds it."""
    found = shutil.which(name)
    if found is not None and os.path.realpath(found) == os.path.realpath(path):
        return name
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
