"""What came of a distillation: figures as JSON, a page to read, and the curve of the loss."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.train.files import write_json, write_whole

REPORT, PAGE, CURVE = "report.json", "report.md", "loss.png"


def write_report(folder: Path, report: dict[str, Any]) -> None:
    write_json(folder / REPORT, report)
    has_curve = bool(report["history"]) and find_spec("matplotlib") is not None
    if has_curve:
        _draw(folder / CURVE, report["history"])
    page = "\n".join(_page(report, has_curve)) + "\n"
    write_whole(folder / PAGE, lambda file: file.write(page.encode()))


def _page(report: dict[str, Any], has_curve: bool) -> list[str]:
    data, training = report["data"], report["training"]
    lines = [
        f"# {report['kind']} for {report['target']}",
        "",
        f"{report['parameters']:,} parameters, {training['steps']:,} steps of "
        f"{training['batch_tokens']:,} tokens, {data['conversations']:,} conversations of "
        f"{data['tokens']:,} tokens.",
        "",
        "## Beside the target's own distribution, on held-out texts",
        "",
        "| tokens ahead | KL | same likeliest token | shared mass |",
        "|---|---|---|---|",
    ]
    agreed = report["agreement"]
    for level, values in enumerate(
        zip(agreed["kl"], agreed["agreement"], agreed["overlap"], strict=True) if agreed else ()
    ):
        kl, same, shared = values
        lines.append(f"| {level + 1} | {kl:.3f} | {same:.3f} | {shared:.3f} |")
    lines += ["", *_acceptance(report["acceptance"])]
    if has_curve:
        lines += ["", f"![KL by step]({CURVE})"]
    return lines


def _acceptance(found: dict[str, Any]) -> list[str]:
    if "not_measured" in found:
        return ["## Acceptance", "", f"Not measured: {found['not_measured']}"]
    lines = [
        f"## Tokens a round at depth {found['depth']}, {found['tokens']} tokens",
        "",
        "| prompts | number | greedy | sampled | greedy drafts accepted |",
        "|---|---|---|---|---|",
    ]
    greedy, sampled = found["greedy"], found["sampled"]
    rows = [("all", greedy["all"], sampled["all"])]
    for group in ("by_category", "by_prompt_length"):
        rows += [(name, each, sampled[group][name]) for name, each in greedy[group].items()]
    for name, one, other in rows:
        lines.append(
            f"| {name} | {one['prompts']} | {one['tokens_a_round']:.2f} | "
            f"{other['tokens_a_round']:.2f} | {one['acceptance']:.0%} |"
        )
    return lines


def _draw(path: Path, history: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    steps = [entry["step"] for entry in history]
    for level in range(len(history[0]["kl"])):
        values = [entry["kl"][level] for entry in history]
        axes.plot(steps, values, label=f"{level + 1} ahead")
    axes.set(xlabel="step", ylabel="KL of student from target", yscale="log")
    axes.legend()
    figure.tight_layout()
    write_whole(path, lambda file: figure.savefig(file, format="png"))
    pyplot.close(figure)
