"""Parts of the GPU benchmark for one variant each: long prompts, deterministic mode, 8-bit weights,
a 70B shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from outrider.benchmarks.gpu_engine import BenchEngine, Decoding, EnlargedModels

DEPTH = 5  # of the 110M draft


class Figures(Protocol):
    """The benchmark, as its parts use it."""

    target: str
    models: EnlargedModels
    prompts: list[list[int]]
    long_prompts: list[list[int]]
    num_tokens: int

    def note(self, key: str, value: float) -> None: ...

    def note_decoding(self, key: str, found: Decoding) -> None: ...


def share_of_same(texts: list[list[int]], expected: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(texts, expected, strict=True)) / len(texts)


def _decode(
    run: Figures,
    name: str,
    models: EnlargedModels,
    prompts: list[list[int]],
    shape: str | None = None,
    depth: int = 0,
) -> list[list[int]]:
    """Record the decoding times; returns the texts."""
    engine = BenchEngine(models, shape, depth)
    engine.decode(prompts[:1], 16)
    found, texts = engine.decode(prompts, run.num_tokens)
    run.note_decoding(name, found)
    engine.close()
    return texts


def _long(run: Figures) -> None:
    """Behind long prompts, where the bundled draft has low acceptance."""
    _decode(run, "long_plain", run.models, run.long_prompts)
    _decode(run, "long_110m_depth2", run.models, run.long_prompts, "110m", 2)


def _deterministic(run: Figures) -> None:
    """The cost of deterministic mode, and that its texts are equal."""
    models = EnlargedModels(run.target, deterministic=True)
    expected = _decode(run, "deterministic_plain", models, run.prompts)
    texts = _decode(run, f"deterministic_110m_depth{DEPTH}", models, run.prompts, "110m", DEPTH)
    run.note("deterministic_same_texts", share_of_same(texts, expected))


def _quantized(run: Figures) -> None:
    """8-bit weights, plain and speculative."""
    for kind in ("fp8", "int8"):
        models = EnlargedModels(run.target, quantization=kind)
        expected = _decode(run, f"{kind}_plain", models, run.prompts)
        texts = _decode(run, f"{kind}_110m_depth{DEPTH}", models, run.prompts, "110m", DEPTH)
        run.note(f"{kind}_same_texts", share_of_same(texts, expected))


def _large(run: Figures) -> None:
    """Two fifths of a 70B shape's layers in 16 bits, and all of them in 8 bits."""
    prompts = run.prompts[:3]
    _decode(run, "70b_slice_plain", EnlargedModels(run.target, "70b-slice"), prompts)
    models = EnlargedModels(run.target, "llama-3.1-70b", quantization="fp8")
    expected = _decode(run, "70b_fp8_plain", models, prompts)
    texts = _decode(run, f"70b_fp8_110m_depth{DEPTH}", models, prompts, "110m", DEPTH)
    run.note("70b_fp8_same_texts", share_of_same(texts, expected))


VARIANTS: dict[str, Callable[[Figures], None]] = {
    "long": _long,
    "deterministic": _deterministic,
    "quantized": _quantized,
    "large": _large,
}
