"""Proposers side by side, over one fixed list of prompts.

    python -m outrider.benchmarks.proposers --out proposers.json
    python -m outrider.benchmarks.proposers --head eagle3=./eagle/checkpoint --depths 3,5
    python -m outrider.benchmarks.proposers --enlarged --head ./eagle/checkpoint --out all.json
    python -m outrider.benchmarks.proposers report proposers.json --markdown proposers.md

Tokens per round are counted over many prompts in batches, with a fixed depth in every round; speed
is that of one request at a time. End-of-text is ignored, so all outputs have the same length.
`--enlarged` measures on a GPU with models enlarged to real shapes. Texts are compared with those of
plain decoding: on a CPU a difference is an error; on a GPU, where rounding depends on batch shapes,
their number is reported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from outrider.benchmarks.proposers.contenders import (
    ProposerVariant,
    check_sources,
    contenders,
    variants,
)
from outrider.benchmarks.proposers.picture import draw
from outrider.benchmarks.proposers.prompts import (
    ALL_GROUPS,
    BenchPrompt,
    first_of_each_group,
    select_prompts,
)
from outrider.benchmarks.proposers.report import markdown
from outrider.benchmarks.proposers.results_file import ResultsFile, machine_facts
from outrider.benchmarks.proposers.small import ProposerBenchSettings, SmallRun
from outrider.checkpoints.resolve import BUNDLED_DRAFT, BUNDLED_TARGET
from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.text.tokenizer import load_tokenizer

SMALL_PARTS, ENLARGED_PARTS = ("rounds", "speed"), ("short", "long")
TARGET_SHAPE, DRAFT_SHAPE = "llama-3.1-8b", "110m"
app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="Where to write the figures, as JSON.")] = None,
    target: Annotated[str, typer.Option(help="The target.")] = BUNDLED_TARGET,
    draft: Annotated[
        list[str] | None, typer.Option(help="PATH or NAME=PATH of a draft model; may be repeated.")
    ] = None,
    head: Annotated[
        list[str] | None, typer.Option(help="PATH or NAME=PATH of a head; may be repeated.")
    ] = None,
    ngram: Annotated[bool, typer.Option(help="Compare n-gram lookup too.")] = True,
    depths: Annotated[str, typer.Option(help="Drafts in every round.")] = "5",
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens a request.")] = 192,
    groups: Annotated[str, typer.Option(help="Groups of prompts.")] = ",".join(ALL_GROUPS),
    per_group: Annotated[int, typer.Option(min=1, help="Prompts of each, for rounds.")] = 4,
    speed_per_group: Annotated[
        int, typer.Option(min=1, help="Prompts of each that run alone, for speed.")
    ] = 1,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, help="Sample at it too, besides greedy.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Generate all tokens, past end-of-text.")] = True,
    max_len: Annotated[int, typer.Option(help="Longest prompt with its answer.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Requests at once, for rounds.")] = 16,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    deterministic: Annotated[bool, typer.Option(help="Texts are equal bit for bit.")] = False,
    enlarged: Annotated[bool, typer.Option(help="Enlarge models to the shape of an 8B.")] = False,
    parts: Annotated[
        str | None, typer.Option(help="Some of rounds,speed or, enlarged, of short,long.")
    ] = None,
) -> None:
    """Measure; results are printed and written at once."""
    if context.invoked_subcommand is not None:
        return
    try:
        settings = ProposerBenchSettings(
            target=target,
            device=_device(device, enlarged),
            tokens=tokens,
            context=max_len,
            batch=batch,
            temperature=temperature,
            ignore_eos=ignore_eos,
            deterministic=deterministic,
        )
        chosen = _parts(parts, ENLARGED_PARTS if enlarged else SMALL_PARTS)
        found = contenders(target, draft or [], head or [], has_ngram=ngram)
        compared = variants(found, _ints(depths))
        check_sources(target, found)
        count = per_group if "rounds" in chosen else speed_per_group
        prompts = select_prompts(groups.split(","), count, _tokenizer(target), max_len - tokens)
        few_prompts = first_of_each_group(prompts, speed_per_group)
        results = ResultsFile(out, _about(settings, compared))
        if enlarged:
            _measure_enlarged(settings, compared, few_prompts, chosen, results)
        else:
            _measure_small(settings, compared, prompts, few_prompts, chosen, results)
    except OutriderError as error:
        raise _exit_of(error) from None


def _exit_of(error: OutriderError) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(error.exit_code)


def _measure_small(
    settings: ProposerBenchSettings,
    compared: list[ProposerVariant],
    prompts: list[BenchPrompt],
    few_prompts: list[BenchPrompt],
    parts: list[str],
    results: ResultsFile,
) -> None:
    measured = SmallRun(settings, compared, results)
    try:
        if "rounds" in parts:
            measured.rounds(prompts)
        if "speed" in parts:
            measured.speed(few_prompts)
    finally:
        measured.close()
    for line in measured.differing:
        typer.echo(line, err=True)
    if measured.differing and settings.device == "cpu":
        raise typer.Exit(1)


def _measure_enlarged(
    settings: ProposerBenchSettings,
    compared: list[ProposerVariant],
    prompts: list[BenchPrompt],
    parts: list[str],
    results: ResultsFile,
) -> None:
    # Imported here: it needs Triton, which not every machine has.
    from outrider.benchmarks.gpu_engine import EnlargedModels
    from outrider.benchmarks.proposers.enlarged import EnlargedRun, by_length

    models = EnlargedModels(settings.target, TARGET_SHAPE, deterministic=settings.deterministic)
    measured = EnlargedRun(
        models,
        results,
        draft_shape=DRAFT_SHAPE,
        tokens=settings.tokens,
        temperatures=settings.temperatures,
    )
    results.add_about(
        shapes={"target": TARGET_SHAPE, "draft": DRAFT_SHAPE, "head": "layers of the target's"}
    )
    part_names = [f"enlarged_{part}" for part in parts]
    lists = {
        part: part_prompts
        for part, part_prompts in by_length(prompts).items()
        if part in part_names
    }
    measured.measure(compared, lists)
    for line in measured.failed:
        typer.echo(line, err=True)
    if measured.failed:
        raise typer.Exit(1)


@app.command()
def report(
    results: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="The figures, as a run wrote them.")
    ],
    markdown_out: Annotated[
        Path | None, typer.Option("--markdown", help="Write tables here instead of showing them.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them, as .svg or .png.")] = None,
) -> None:
    """Print or write tables of the results, and plot them."""
    figures = json.loads(results.read_text())
    text = markdown(figures)
    if markdown_out is None:
        typer.echo(text)
    else:
        markdown_out.write_text(text)
    if plot is None:
        return
    try:
        draw(figures, plot)
    except OutriderError as error:
        raise _exit_of(error) from None


def _device(name: str, enlarged: bool) -> str:
    has_gpu = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device is {name!r}; choose auto, cpu or cuda.")
    found = ("cuda" if has_gpu else "cpu") if name == "auto" else name
    if found == "cuda" and not has_gpu:
        raise ConfigError("--device is 'cuda' but there is no GPU here; choose cpu.")
    if enlarged and found != "cuda":
        raise ConfigError("--enlarged needs a GPU, which is not here; leave it out.")
    return found


def _tokenizer(target: str) -> Any:
    """The target's tokenizer; the bundled target's for a folder without one."""
    try:
        return load_tokenizer(target)
    except ModelError as error:
        typer.echo(f"prompts are encoded as for {BUNDLED_TARGET}: {error}", err=True)
        return load_tokenizer(BUNDLED_DRAFT)


def _parts(given: str | None, known: tuple[str, ...]) -> list[str]:
    chosen = list(known) if given is None else given.split(",")
    for part in chosen:
        if part not in known:
            raise ConfigError(f"--parts has {part!r}; choose from {', '.join(known)}.")
    return chosen


def _ints(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise ConfigError(f"--depths is {text!r}; give whole numbers, as 3,5.") from None


def _about(settings: ProposerBenchSettings, compared: list[ProposerVariant]) -> dict[str, Any]:
    sources = {each.contender.name: each.contender.source for each in compared}
    return {
        **machine_facts(settings.device),
        "target": settings.target,
        "sources": {name: source for name, source in sources.items() if source},
        "output_tokens": settings.tokens,
        "batch": settings.batch,
        "temperature": settings.temperature,
        "ignore_eos": settings.ignore_eos,
        "deterministic": settings.deterministic,
    }


if __name__ == "__main__":
    app()
