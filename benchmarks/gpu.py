"""Speed on one GPU: plain and speculative decoding of enlarged models, and the chip's limits.

    PYTHONPATH=src python -m outrider.benchmarks.gpu --out docs/results/gpu.json

The target has the shape of Llama-3.1-8B and the function of the bundled SmolLM2-135M; the drafts
have the shapes of a 110M and of Llama-3.2-1B and the function of the bundled draft. So acceptance
is that of a real pair, and cost that of real sizes. Prompts are Spec-Bench's.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from outrider.benchmarks.checkout import commit
from outrider.benchmarks.gpu_engine import BenchEngine, Decoding, EnlargedModels
from outrider.benchmarks.gpu_floor import copy_tb_per_s, linears_ms, matrix_tflops, read_tb_per_s
from outrider.benchmarks.gpu_variants import VARIANTS, share_of_same
from outrider.benchmarks.prompts import encode_question, read_questions, select_questions
from outrider.checkpoints.resolve import BUNDLED_DRAFT, BUNDLED_TARGET
from outrider.text.tokenizer import load_tokenizer
from outrider.workers.models.spec import ModelSpec

GOALS = {
    "plain_ms_per_token": 4.2,
    "spec_greedy_ms_per_token": 1.95,
    "spec_t07_ms_per_token": 2.6,
    "spec_1b_greedy_ms_per_token": 3.0,
    "verify6_over_1": 1.05,
    "draft_round5_ms": 0.9,
    "host_critical_ms_per_round": 0.15,
}
# Rows of decoding, of verification under load, and of passes with prefill.
LINEARS_ROWS = (1, 6, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
# The bundled draft has low acceptance behind longer prompts; they are measured separately.
SHORT_PROMPT = 256
LONG_PROMPT = 1200


PARTS = ("chip", "single", "batch", "prefill", *VARIANTS)
_DEFAULT_PARTS = [part for part in PARTS if part != "large"]  # needs a GPU of 100 GB or more


class GpuBenchRun:
    """Collects results, and prints each at once."""

    def __init__(self, target: str, per_group: int, num_tokens: int) -> None:
        self.target = target
        self.models = EnlargedModels(target)
        encoded = _prompts(per_group)
        self.prompts = [prompt for prompt in encoded if len(prompt) <= SHORT_PROMPT]
        self.long_prompts = [p for p in encoded if SHORT_PROMPT < len(p) <= LONG_PROMPT]
        self.num_tokens = num_tokens
        self.results: dict[str, Any] = {}
        self.start_s = time.perf_counter()

    def note(self, key: str, value: float) -> None:
        self.results[key] = round(value, 4)
        print(f"{time.perf_counter() - self.start_s:6.1f} s  {key}: {value:.4g}", flush=True)

    def note_decoding(self, key: str, found: Decoding) -> None:
        self.note(f"{key}_ms_per_token", found.ms_per_token)
        self.results[key] = {
            "tokens_per_round": round(found.tokens_per_round, 3),
            "ms_per_round": round(found.ms_per_round, 4),
            "host_ms_per_round": round(found.host_ms_per_round, 4),
            "tokens": found.tokens,
        }
        print(f"          {self.results[key]}", flush=True)

    # -- one request at a time -----------------------------------------------------------------

    def plain(self) -> list[list[int]]:
        engine = BenchEngine(self.models)
        engine.decode(self.prompts[:1], 16)
        found, texts = engine.decode(self.prompts, self.num_tokens)
        self.note_decoding("plain", found)
        self.results["plain_device_ms"] = found.device_s / found.rounds * 1e3
        engine.close()
        return texts

    def speculative(self, shape: str, depth: int, expected: list[list[int]]) -> dict[str, Decoding]:
        engine = BenchEngine(self.models, shape, depth)
        engine.decode(self.prompts[:1], 16)
        loop = engine.loop
        draft_s, verify_s, steps = loop.draft_s, loop.verify_s, loop.scheduler.stats.steps
        greedy, texts = engine.decode(self.prompts, self.num_tokens)
        rounds = loop.scheduler.stats.steps - steps
        name = f"{shape}_depth{depth}"
        self.note_decoding(f"{name}_greedy", greedy)
        self.note(f"{name}_draft_ms", (loop.draft_s - draft_s) / rounds * 1e3)
        self.note(f"{name}_verify_ms", (loop.verify_s - verify_s) / rounds * 1e3)
        self.note(f"{name}_same_texts", share_of_same(texts, expected))
        warm, _ = engine.decode(self.prompts, self.num_tokens, temperature=0.7)
        self.note_decoding(f"{name}_t07", warm)
        engine.close()
        return {"greedy": greedy, "t07": warm}

    # -- many requests -------------------------------------------------------------------------

    def batch(self, size: int, depth: int, shape: str = "110m") -> None:
        engine = BenchEngine(self.models, shape, depth, batch=size, max_len=1024)
        prompts = [self.prompts[i % len(self.prompts)][:512] for i in range(size)]
        found = engine.throughput(prompts, 160)
        name = f"batch{size}_depth{depth}"
        self.note(f"{name}_tokens_per_s", found.tokens / found.wall_s)
        self.note(f"{name}_ms_per_round", found.ms_per_round)
        self.note(f"{name}_host_ms_per_round", found.host_ms_per_round)
        if depth == 0:
            context = sum(map(len, prompts)) / size + 80
            self._compare_with_floor(size, found, context)
        engine.close()

    def _compare_with_floor(self, size: int, found: Decoding, context: float) -> None:
        spec = self.models.target().spec
        linears = linears_ms(self.models.target(), size)
        kv = size * context * kv_bytes_per_token(spec) / self.results["read_tb_per_s"] / 1e9
        self.note(f"batch{size}_linears_ms", linears)
        self.note(f"batch{size}_share_of_floor", (linears + kv) / found.ms_per_round)

    def prefill(self, length: int) -> None:
        engine = BenchEngine(self.models, max_len=length + 64, budget=length)
        prompt = [5 + i * 7919 % 40000 for i in range(length)]
        times = []
        for _ in range(3):
            before = engine.loop.verify_s
            engine.add(prompt, 1, 0.0, 0)
            engine.drain()
            times.append(engine.loop.verify_s - before)
        flops = prefill_flops(self.models.target().spec, length)
        self.note(f"prefill_{length}_ms", min(times) * 1e3)
        tflops = flops / min(times) / 1e12
        self.note(f"prefill_{length}_tflops", tflops)
        self.note("prefill_share_of_matrix_rate", tflops / self.results["matrix_tflops"])
        engine.close()


def kv_bytes_per_token(spec: ModelSpec) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2


def prefill_flops(spec: ModelSpec, length: int) -> float:
    """The layers' linears, and causal attention."""
    body = spec.num_params - 2 * spec.vocab_size * spec.hidden_size
    attention = 4 * length**2 / 2 * spec.num_heads * spec.head_dim * spec.num_layers
    return 2 * body * length + attention


def _prompts(per_group: int) -> list[list[int]]:
    tokenizer = load_tokenizer(BUNDLED_DRAFT)
    questions = select_questions(read_questions(), per_group)
    return [encode_question(question, tokenizer) for question in questions]


def _facts(run: GpuBenchRun) -> dict[str, Any]:
    prompts = run.prompts
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "draft": "4 layers, hidden 768, MLP 3072, untied head (110m); llama-3.2-1b shape",
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "target": "llama-3.1-8b shape, vocabulary 49152, bfloat16",
        "output_tokens": run.num_tokens,
        "prompts": len(prompts),
        "mean_prompt_tokens": round(sum(map(len, prompts)) / len(prompts), 1),
    }


def main(
    out: Annotated[Path, typer.Option(help="Where to write the figures.")],
    target: Annotated[str, typer.Option(help="The small target.")] = BUNDLED_TARGET,
    per_group: Annotated[int, typer.Option(help="Questions of each group of Spec-Bench.")] = 2,
    num_tokens: Annotated[int, typer.Option(help="Output tokens a request.")] = 192,
    depths: Annotated[str, typer.Option(help="Depths of the 110M draft.")] = "2,3,4,5",
    depths_1b: Annotated[str, typer.Option(help="Depths of the 1B draft.")] = "2",
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "8,64,256",
    parts: Annotated[str, typer.Option(help=f"Which of {', '.join(PARTS)}.")] = ",".join(
        _DEFAULT_PARTS
    ),
) -> None:
    """Run the chosen parts; results are written even after an error."""
    run = GpuBenchRun(target, per_group, num_tokens)
    run.results["about"] = _facts(run)
    try:
        _measure(run, parts.split(","), _ints(depths), _ints(depths_1b), _ints(batches))
    finally:
        out.write_text(json.dumps(run.results, indent=1) + "\n")
    _show(run.results)


def _measure(
    run: GpuBenchRun, parts: list[str], depths: list[int], depths_1b: list[int], batches: list[int]
) -> None:
    if "chip" in parts:
        run.note("read_tb_per_s", read_tb_per_s())
        run.note("copy_tb_per_s", copy_tb_per_s())
        run.note("matrix_tflops", matrix_tflops())
        for rows in LINEARS_ROWS:
            run.note(f"linears_{rows}_ms", linears_ms(run.models.target(), rows))
    if "single" in parts:
        _measure_single(run, depths, depths_1b)
    if "batch" in parts:
        for size in batches:
            run.batch(size, 0)
        run.batch(8, 3)
        run.batch(64, 2)
        plain = run.results["batch8_depth0_tokens_per_s"]
        run.note("batch8_speedup", run.results["batch8_depth3_tokens_per_s"] / plain)
    if "prefill" in parts:
        run.prefill(8192)
    for name, measure in VARIANTS.items():
        if name in parts:
            measure(run)


def _measure_single(run: GpuBenchRun, depths: list[int], depths_1b: list[int]) -> None:
    expected = run.plain()
    found = {depth: run.speculative("110m", depth, expected) for depth in depths}
    for kind in ("greedy", "t07"):
        best = min(found, key=lambda depth: found[depth][kind].ms_per_token)
        run.results[f"spec_{kind}_depth"] = best
        run.note(f"spec_{kind}_ms_per_token", found[best][kind].ms_per_token)
        if kind == "greedy":
            run.note("host_critical_ms_per_round", found[best][kind].host_ms_per_round)
    if 5 in found:
        run.note("draft_round5_ms", run.results["110m_depth5_draft_ms"])
        verify = run.results["110m_depth5_verify_ms"]
        run.note("verify6_over_1", verify / run.results["plain_device_ms"])
    best_1b = min(
        run.speculative("llama-3.2-1b", depth, expected)["greedy"].ms_per_token
        for depth in depths_1b
    )
    run.note("spec_1b_greedy_ms_per_token", best_1b)


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _show(results: dict[str, Any]) -> None:
    table = Table("figure", "measured", "goal")
    for key, goal in GOALS.items():
        if key in results:
            table.add_row(key, f"{results[key]:.3f}", f"{goal}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
