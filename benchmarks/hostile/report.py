"""The report of a run: `run.json`, `report.md` and a picture."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any


def write_report(folder: Path, result: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "report.md").write_text(_markdown(result))
    _picture(folder / "overview.png", result)


def _markdown(result: dict[str, Any]) -> str:
    quiet, hostile = result["phases"]
    memory = [megabytes for at_s, megabytes in result["memory"] if at_s > 0]
    rows = [
        ("minutes", *(f"{each['seconds'] / 60:.1f}" for each in (quiet, hostile))),
        ("gap p50, ms", *_ms(quiet, hostile, "gap_p50_s")),
        ("gap p99, ms", *_ms(quiet, hostile, "gap_p99_s")),
        ("largest gap, ms", *_ms(quiet, hostile, "gap_max_s")),
        ("first chunk p50, ms", *_ms(quiet, hostile, "first_p50_s")),
        ("first chunk p99, ms", *_ms(quiet, hostile, "first_p99_s")),
        ("requests completed", *(str(each["completed"]) for each in (quiet, hostile))),
        ("requests failed", *(str(len(each["failures"])) for each in (quiet, hostile))),
    ]
    lines = [
        "# Honest streams under attack",
        "",
        f"{result['streams']} honest streams, {result['attackers']} attackers with keys of one "
        f"request a minute each; the bundled pair on {platform.machine()}, attackers on the same "
        "machine at the lowest priority.",
        "",
        "| | quiet | under attack |",
        "|---|---:|---:|",
        *(f"| {name} | {before} | {after} |" for name, before, after in rows),
        "",
        f"Gap p99 under attack / quiet: **{result['p99_ratio']}**. Processes replaced: "
        f"**{result['restarted']}**. Memory of all processes under attack: {memory[0]:.0f} MiB at "
        f"first, {max(memory):.0f} at most, {memory[-1]:.0f} at the end.",
        "",
        "![gaps and memory](overview.png)",
        "",
        "Answers the attackers got:",
        "",
        "| attack and answer | count |",
        "|---|---:|",
        *(f"| {name} | {count} |" for name, count in sorted(result["answers"].items())),
        "",
    ]
    return "\n".join(lines)


def _ms(quiet: dict[str, Any], hostile: dict[str, Any], name: str) -> tuple[str, str]:
    return f"{1000 * quiet[name]:.0f}", f"{1000 * hostile[name]:.0f}"


def _picture(path: Path, result: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (gaps, memory) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True)
    quiet = 1000 * result["phases"][0]["gap_p99_s"]
    gaps.plot([each[0] for each in result["gaps"]], [1000 * each[1] for each in result["gaps"]])
    gaps.axhline(quiet, linestyle="--", color="grey", label="quiet")
    gaps.axhline(3 * quiet, linestyle=":", color="red", label="3x quiet")
    gaps.set_ylabel("gap p99, ms")
    gaps.set_ylim(bottom=0)
    gaps.legend()
    memory.plot([at_s / 60 for at_s, _ in result["memory"]], [each[1] for each in result["memory"]])
    memory.set_ylabel("memory, MiB")
    memory.set_ylim(bottom=0)
    memory.set_xlabel("minutes under attack")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
