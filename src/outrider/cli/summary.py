"""Speculation statistics of a generation, as a table and a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.engine.build import BuiltEngine
    from outrider.text.outputs import CompletionOutput, RequestOutput
    from outrider.workers.models.spec import ModelSpec

_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class GenerationRun:
    """A finished generation, and the time the step loop spent on each side of it."""

    request: RequestOutput
    draft_s: float
    verify_s: float

    @property
    def text(self) -> CompletionOutput:
        return self.request.outputs[0]

    @property
    def tokens_per_s(self) -> float:
        """Over the whole request, prompt included."""
        latency_s = self.request.metrics.latency_s
        return len(self.text.token_ids) / latency_s if latency_s else 0.0


def summary(run: GenerationRun, plain: GenerationRun | None, built: BuiltEngine) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title_justify="left", caption_justify="left")
    table.add_column()
    for name in ("speculative", "plain") if plain is not None else ("",):
        table.add_column(name, justify="right")
    columns = [_figures(each, built) for each in (run, plain) if each is not None]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    return table


def _figures(run: GenerationRun, built: BuiltEngine) -> dict[str, str]:
    record, metrics = run.text.speculation, run.request.metrics
    total_s = run.draft_s + run.verify_s
    figures = {
        "acceptance rate": _NOTHING,
        "block efficiency": f"{record.block_efficiency:.2f}",
        "tokens": str(len(run.text.token_ids)),
        "tokens/s": f"{run.tokens_per_s:.1f}",
        "time to first token": f"{metrics.time_to_first_token_s or 0.0:.3f} s",
        "draft share of time": f"{run.draft_s / total_s if total_s else 0.0:.1%}",
        "memory-bound speedup": f"{memory_bound_speedup(run, built):.2f}x",
        "finish reason": run.text.finish_reason or _NOTHING,
        "seed": str(run.text.seed),
    }
    if record.drafted:
        share = f"{record.acceptance_rate:.1%}"
        figures["acceptance rate"] = f"{share} ({record.accepted} of {record.drafted})"
    return figures


def memory_bound_speedup(run: GenerationRun, built: BuiltEngine) -> float:
    """tau / (c * gamma + 1): the speed-up if a pass costs only the reading of its weights.

    tau is block efficiency, gamma the drafted tokens per round, c the ratio of draft to target
    bytes.
    """
    record, config = run.text.speculation, built.config
    cost_ratio = 0.0
    if record.drafted and config.method == "draft" and built.draft and built.target:
        draft_bytes = _weight_bytes(built.draft, config.draft.quantization, built)
        cost_ratio = draft_bytes / _weight_bytes(built.target, config.target.quantization, built)
    drafted = record.drafted / record.rounds if record.rounds else 0.0
    return record.block_efficiency / (cost_ratio * drafted + 1)


def _weight_bytes(spec: ModelSpec, quantization: str | None, built: BuiltEngine) -> int:
    width = 4 if built.config.target.dtype == "float32" else 2
    # Only GPU kernels keep 8-bit weights; others dequantize at load.
    if quantization is None or built.facts.kernels != "triton":
        return width * spec.num_params
    return width * spec.num_params - (width - 1) * spec.num_linear_weights


def comparison(run: GenerationRun, plain: GenerationRun, config: EngineConfig) -> str:
    ratio = run.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 0.0
    speed = f"{ratio:.2f} times the speed of plain decoding"
    if run.text.token_ids == plain.text.token_ids:
        return f"Same text at {speed}."
    pairs = zip(run.text.token_ids, plain.text.token_ids, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(plain.text.token_ids))
    if config.speculation.verification == "rejection":
        reason = "rejection sampling keeps the distribution, not the sample"
    elif config.deterministic:
        reason = "which is a defect in deterministic mode: please report it"
    else:
        reason = "rounding may decide a near-tie; --deterministic rules that out"
    return f"Another text from token {same + 1} on ({reason}), at {speed}."
