"""Draws the README's chart from docs/results/served-peers-h200.json.

python docs/images/served.py        # writes served.svg beside this file
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
WIDTH, HEIGHT = 860, 290
PANEL, GAP, LEFT = 190, 20, 20
BAR_TOP, BAR_HEIGHT = 92, 150
COLOURS = {"auto": "#1f6feb", "plain": "#8fb8f6", "vllm": "#9a9a9a", "vllm 2": "#cfcfcf"}
FONT = 'font-family="Helvetica, Arial, sans-serif"'
Bars = list[tuple[str, int]]  # colour and tokens/s


def arms() -> list[tuple[int, Bars]]:
    """By number of clients: the arms of one run."""
    found = _read("served-peers-h200.json")
    rates = [arm["tokens_per_s"] for arm in found["arms"]]
    return [
        (clients, [(key, rate[i]) for key, rate in zip(COLOURS, rates, strict=True)])
        for i, clients in enumerate(found["clients"])
    ]


def draw() -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 28, "Served tokens/s, one H200, 8B target, streaming over HTTP", 17, "bold"),
        *_legend(
            52,
            [
                ("auto", "Outrider, auto"),
                ("plain", "Outrider, plain"),
                ("vllm", "vLLM 0.26, plain"),
                ("vllm 2", "vLLM 0.26, draft model, depth 2"),
            ],
        ),
        *_row(BAR_TOP, arms()),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def _row(top: int, panels: list[tuple[int, Bars]], height: int = BAR_HEIGHT) -> list[str]:
    lines = []
    for number, (clients, bars) in enumerate(panels):
        left = LEFT + number * (PANEL + GAP)
        highest = max(rate for _, rate in bars)
        width = PANEL // len(bars)
        for i, (key, rate) in enumerate(bars):
            x, tall = left + i * width, round(height * rate / highest)
            y = top + height - tall
            fill = COLOURS[key]
            lines.append(
                f'<rect x="{x}" y="{y}" width="{width - 8}" height="{tall}" fill="{fill}"/>'
            )
            lines.append(_text(x + (width - 8) // 2, y - 5, f"{rate:,}", 12, anchor="middle"))
        base = top + height
        lines.append(f'<path d="M{left} {base}h{PANEL - 8}" stroke="#555555"/>')
        label = "1 client" if clients == 1 else f"{clients} clients"
        lines.append(_text(left + (PANEL - 8) // 2, base + 18, label, 13, anchor="middle"))
    return lines


def _legend(y: int, entries: list[tuple[str, str]]) -> list[str]:
    lines, x = [], LEFT
    for key, words in entries:
        lines.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[key]}"/>')
        lines.append(_text(x + 18, y, words, 13))
        x += 40 + 7 * len(words)
    return lines


def _text(x: int, y: int, words: str, size: int, weight: str = "", anchor: str = "") -> str:
    extra = f' font-weight="{weight}"' if weight else ""
    extra += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="#222222"{extra}>{words}</text>'


if __name__ == "__main__":
    (HERE / "served.svg").write_text(draw(), encoding="utf-8")
