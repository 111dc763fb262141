"""The page of a distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.train.report import CURVE, PAGE, write_report


def report(held_out: list[float]) -> dict[str, Any]:
    history: list[dict[str, Any]] = []
    for number, value in enumerate(held_out):
        history.append({"step": 100 * number + 20, "kl": [1.0 / (number + 1), 2.0]})
        history.append({"step": 100 * number + 100, "held_out": [value, 2 * value]})
    return {
        "kind": "draft",
        "target": "toy",
        "parameters": 1000,
        "training": {"steps": 300, "batch_tokens": 64},
        "data": {"conversations": 10, "tokens": 100},
        "agreement": {},
        "acceptance": {"not_measured": "there was no time."},
        "history": history,
    }


def page(folder: Path, held_out: list[float]) -> str:
    write_report(folder, report(held_out))
    return (folder / PAGE).read_text()


def test_overfitting_is_reported(tmp_path: Path) -> None:
    text = page(tmp_path, [0.8, 0.6, 0.7])
    assert "Held-out KL was lowest at step 200 (0.900, 1.050 at the end)" in text


@pytest.mark.parametrize("held_out", [[], [0.8], [0.8, 0.7, 0.6], [0.8, 0.6, 0.603]])
def test_held_out_kl_without_a_minimum_is_not_reported(
    held_out: list[float], tmp_path: Path
) -> None:
    assert "Held-out KL was lowest" not in page(tmp_path, held_out)


def test_the_curve_has_both_kinds_of_texts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page(tmp_path, [0.8, 0.6])
    assert (tmp_path / CURVE).read_bytes().startswith(b"\x89PNG")
