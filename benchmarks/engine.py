"""Tokens per second of Outrider, `transformers`, vLLM and llama.cpp, prompt by prompt.

    python -m outrider.benchmarks.engine --per-group 2 --out engine.json

All engines run the same pair, greedy, end-of-text ignored, prefix caches off. transformers and vLLM
read float32. Outrider and llama.cpp read the target's GGUF file, the latter with 8-bit activations;
Outrider also runs in float32. Each engine has its own process, and only one works at a time.
Figures are of whole calls, prompt included, and of decoding only: a whole call less a call for one
token on the same prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.benchmarks.peers.comparison import TimedCall
from outrider.benchmarks.peers.measure import Case, PeerVariant, run_interleaved, warm_up
from outrider.benchmarks.peers.plan import (
    ENGINES,
    OUTRIDER,
    TRANSFORMERS,
    ComparisonSettings,
    plan_variants,
    start_peers,
)
from outrider.benchmarks.peers.process import PeerProcess
from outrider.benchmarks.peers.protocol import PeerInfo, Tokens
from outrider.benchmarks.peers.report import (
    ComparisonSection,
    against,
    as_json,
    by_group,
    disturbance,
    overview,
    show,
)
from outrider.benchmarks.prompts import (
    GROUPS,
    Question,
    encode_question,
    read_questions,
    select_questions,
)
from outrider.checkpoints.resolve import BUNDLED_DRAFT, BUNDLED_TARGET
from outrider.errors import ConfigError, OutriderError
from outrider.text.tokenizer import load_tokenizer

WARM_UP_TOKENS = 16
DEFAULT_ENGINES, DEFAULT_GROUPS, DEFAULT_DEPTHS = list(ENGINES), list(GROUPS), [2, 3, 5]
console = Console()
app = typer.Typer(add_completion=False)


def single_cases(questions: Sequence[Question], prompts: Sequence[Tokens]) -> list[Case]:
    return [
        Case(str(question.question_id), question.group, (prompt,))
        for question, prompt in zip(questions, prompts, strict=True)
    ]


def batch_cases(prompts: Sequence[Tokens], size: int) -> list[Case]:
    """Prompts in full batches of `size`, repeated if they do not fill one."""
    count = max(1, len(prompts) // size)
    endless = itertools.cycle(prompts)
    return [Case(f"batch {i}", "all", tuple(itertools.islice(endless, size))) for i in range(count)]


def run_benchmark(
    settings: ComparisonSettings,
) -> tuple[list[ComparisonSection], dict[str, PeerInfo]]:
    tokenizer = load_tokenizer(settings.target)
    questions = select_questions(read_questions(), settings.per_group, settings.groups)
    prompts = [encode_question(q, tokenizer, chat=settings.chat) for q in questions]
    longest = max(map(len, prompts)) + settings.max_tokens
    if longest > settings.max_model_len:
        raise ConfigError(
            f"max_model_len is {settings.max_model_len} but the longest prompt and its answer "
            f"need {longest}; raise --max-model-len."
        )
    with ExitStack() as stack:
        planned = plan_variants(settings)
        peers = start_peers(settings, planned, stack, _say)
        variants = [variant for variant in planned if variant.peer in peers]
        if not variants:
            raise ConfigError("no engine could be started; see the lines above.")
        for variant in variants:
            warm_up(peers[variant.peer], variant, prompts[0], WARM_UP_TOKENS)
        sections = list(_sections(settings, peers, variants, questions, prompts))
        return sections, {name: peer.info for name, peer in peers.items()}


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _sections(
    settings: ComparisonSettings,
    peers: dict[str, PeerProcess],
    variants: Sequence[PeerVariant],
    questions: Sequence[Question],
    prompts: Sequence[Tokens],
) -> Iterator[ComparisonSection]:
    together = [variant for variant in variants if variant.peer != TRANSFORMERS]
    plans = [("One request at a time", variants, single_cases(questions, prompts))]
    if settings.batch > 1 and together:
        title = f"{settings.batch} requests at once"
        plans.append((title, together, batch_cases(prompts, settings.batch)))
    for title, chosen, cases in plans:
        samples = run_interleaved(
            peers,
            chosen,
            cases,
            max_tokens=settings.max_tokens,
            repeats=settings.repeats,
            on_call=_print_sample,
        )
        names = tuple(variant.name for variant in chosen)
        yield ComparisonSection(title, names[0], names, tuple(samples))
        decoded = tuple(sample.after_prompt() for sample in samples)
        yield ComparisonSection(f"{title}, decoding only", names[0], names, decoded)


def _print_sample(sample: TimedCall) -> None:
    run = sample.generation
    others = "" if sample.foreign_cpu is None else f"  others {sample.foreign_cpu:4.0%}"
    console.print(
        f"{sample.group:<14} {sample.case:>8}  {sample.variant:<24}"
        f"{run.num_tokens / run.seconds:7.1f} tokens/s{others}",
        highlight=False,
    )


def report(sections: Sequence[ComparisonSection]) -> None:
    grids = []
    for section in sections:
        ours = [name for name in section.variants if name.startswith(OUTRIDER)]
        peers = [name for name in section.variants if name not in ours]
        grids.append(overview(section))
        if ours and peers:
            grids.append(against(section, ours, peers))
        if len(section.groups()) > 1:
            grids.append(by_group(section, [name for name in ours if name != section.reference]))
    show(grids, [disturbance([s for section in sections for s in section.samples])], console)


@app.command()
def main(
    target: Annotated[str, typer.Option(help="Target: bundled name, folder or GGUF.")] = (
        BUNDLED_TARGET
    ),
    draft: Annotated[str, typer.Option(help="Draft: bundled name or folder.")] = BUNDLED_DRAFT,
    engine: Annotated[list[str], typer.Option(help="Engines to run.")] = DEFAULT_ENGINES,
    group: Annotated[list[str], typer.Option(help="Groups of Spec-Bench.")] = DEFAULT_GROUPS,
    per_group: Annotated[int, typer.Option(help="Prompts of each group.")] = 1,
    chat: Annotated[bool, typer.Option(help="Chat template, or the bare text.")] = True,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for a prompt.")] = 64,
    depth: Annotated[list[int], typer.Option(help="Drafts a round; repeatable.")] = DEFAULT_DEPTHS,
    ngram_depth: Annotated[int, typer.Option(help="N-gram drafts a round.")] = 5,
    vllm_python: Annotated[
        str | None, typer.Option(help="Interpreter of an environment with vLLM.")
    ] = None,
    vllm_depth: Annotated[int, typer.Option(help="Drafts a round of vLLM.")] = 2,
    llama_python: Annotated[
        str | None, typer.Option(help="Interpreter of an environment with xllamacpp.")
    ] = None,
    llama_server: Annotated[
        str | None, typer.Option(help="A compiled llama-server, instead of xllamacpp.")
    ] = None,
    llama_depth: Annotated[int, typer.Option(help="Drafts a round of llama.cpp.")] = 2,
    llama_search: Annotated[
        bool, typer.Option(help="Find llama.cpp's fastest settings first, in a minute or two.")
    ] = True,
    batch: Annotated[int, typer.Option(help="Requests at once; 1 leaves that part out.")] = 5,
    repeats: Annotated[int, typer.Option(help="Times each prompt is run; medians count.")] = 1,
    threads: Annotated[int, typer.Option(help="Threads of each engine.")] = 2,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt and answer.")] = 2048,
    out: Annotated[Path | None, typer.Option(help="JSON file for the result.")] = None,
) -> None:
    """Compare Outrider with other engines on Spec-Bench prompts, interleaved in one run."""
    try:
        settings = ComparisonSettings(
            target=target,
            draft=draft,
            engines=tuple(engine),
            groups=tuple(group),
            per_group=per_group,
            chat=chat,
            max_tokens=max_tokens,
            depths=tuple(depth),
            ngram_depth=ngram_depth,
            vllm_python=vllm_python,
            vllm_depth=vllm_depth,
            llama_python=llama_python,
            llama_server=llama_server,
            llama_depth=llama_depth,
            llama_search=llama_search,
            batch=batch,
            repeats=repeats,
            threads=threads,
            max_model_len=max_model_len,
        )
        sections, peers = run_benchmark(settings)
    except OutriderError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    if out is not None:
        result = as_json(sections, peers, dataclasses.asdict(settings))
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report(sections)


if __name__ == "__main__":
    app()
