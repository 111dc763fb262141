"""`outrider trace`: where the time of a round goes when draft and target are processes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.config import ConfigOption, SetOption, load_config, setting_help
from outrider.cli.server_options import option
from outrider.cli.settings_command import LocalCommand
from outrider.config import EngineConfig
from outrider.config.sources import SourcedValue
from outrider.errors import ConfigError
from outrider.progress import ProgressSpinner
from outrider.requirements import need
from outrider.scheduler.params import SamplingParams
from outrider.trace import FOLDER_VARIABLE, TraceSpan, traced
from outrider.trace_report import (
    by_step,
    chrome_trace,
    medians,
    message_counts,
    read_spans,
    rounds,
)

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

_TOKENS_A_ROUND = 8  # at most; enough tokens for the requested rounds, and some to warm up
_WARM_UP_ROUNDS = 8

app = typer.Typer(add_completion=False)


@app.command(cls=LocalCommand)
def trace(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The prompt.")] = "Tell a long story.",
    model: Annotated[str | None, option("--model", "-m", help=setting_help("model"))] = None,
    draft_model: Annotated[
        str | None, option("--draft-model", help=setting_help("draft_model"))
    ] = None,
    depth: Annotated[
        int | None,
        option("--depth", "-k", help=setting_help("num_speculative_tokens")),
    ] = None,
    num_rounds: Annotated[
        int, typer.Option("--rounds", min=2, max=1000, help="Rounds to record.")
    ] = 20,
    num_requests: Annotated[
        int, typer.Option("--requests", min=1, help="Requests at once, all with this prompt.")
    ] = 1,
    out: Annotated[Path, typer.Option("--out", help="File of the Chrome trace.")] = Path(
        "trace.json"
    ),
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Run requests over processes on this host, and write a Chrome trace of their rounds."""
    flags = {"model": model, "draft_model": draft_model, "num_speculative_tokens": depth}
    implied = {
        "workers": SourcedValue("processes", "outrider trace"),
        "speculation.policy": SourcedValue("fixed", "outrider trace"),
    }
    engine_config = load_config(ctx, config, assignments, flags, implied).config
    if engine_config.draft.model is None:
        raise ConfigError("there is no draft to trace; choose one with --draft-model.")
    need("torch", "transformers", "safetensors", "numpy")
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        _run(engine_config, [prompt] * num_requests, num_rounds, Path(folder))
        spans = read_spans(Path(folder), num_rounds)
    out.write_text(json.dumps(chrome_trace(spans)), encoding="utf-8")
    _print(spans, out)


def _run(config: EngineConfig, prompts: Sequence[str], num_rounds: int, folder: Path) -> None:
    """Generate with every process writing its spans into the folder when it ends."""
    from outrider.cli.visible import SafeConsole
    from outrider.engine.build import build_engine
    from outrider.engine.engine import Engine

    with _variable(FOLDER_VARIABLE, str(folder)):  # inherited by the ranks
        with ProgressSpinner(SafeConsole(stderr=True), "loading the models"):
            engine = Engine(build_engine(config))
        _generate(engine, prompts, num_rounds)


def _generate(engine: Engine, prompts: Sequence[str], num_rounds: int) -> None:
    num_tokens = _TOKENS_A_ROUND * (num_rounds + _WARM_UP_ROUNDS)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with traced("engine", engine.built.loop.traced_methods):
        for number, prompt in enumerate(prompts):
            engine.add(f"trace-{number}", prompt, params)
        while engine.has_work:
            engine.step()
        engine.close()


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _print(processes: Mapping[str, Sequence[TraceSpan]], out: Path) -> None:
    spans = by_step(processes)
    found = rounds(spans)
    print(f"{len(found)} rounds in {out}; open it in chrome://tracing or ui.perfetto.dev")
    if found:
        total, outcome_hop, draft, proposals_hop, verify = medians(found)
        print(
            f"a round, median ms: {total:.2f} = outcome to draft {outcome_hop:.2f} + draft "
            f"{draft:.2f} + proposals to target {proposals_hop:.2f} + verify {verify:.2f}"
        )
    for name, count in message_counts(spans).items():
        print(f"{count:.2f} a step  {name}")
