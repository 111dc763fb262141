"""The report of a distillation: figures as JSON, a Markdown page, and the loss curve."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.train.files import write_json, write_whole

REPORT, PAGE, CURVE = "report.json", "report.md", "loss.png"
_NOISE = 0.01  # relative, of figures over a few held-out texts


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
    for draft_index, values in enumerate(
        zip(agreed["kl"], agreed["agreement"], agreed["overlap"], strict=True) if agreed else ()
    ):
        kl, same, shared = values
        lines.append(f"| {draft_index + 1} | {kl:.3f} | {same:.3f} | {shared:.3f} |")
    lines += [*_overfitting(report["history"]), "", *_acceptance(report["acceptance"])]
    if has_curve:
        lines += ["", f"![KL by step]({CURVE})"]
    return lines


def _overfitting(history: list[dict[str, Any]]) -> list[str]:
    """A sentence if held-out KL was lower before the end."""
    means = [
        (sum(entry["held_out"]) / len(entry["held_out"]), entry["step"])
        for entry in history
        if "held_out" in entry
    ]
    if not means or means[-1][0] <= min(means)[0] * (1 + _NOISE):
        return []
    least, step = min(means)
    return [
        "",
        f"Held-out KL was lowest at step {step:,} ({least:.3f}, {means[-1][0]:.3f} at the end): "
        "from there on the student overfits. Let the target write more texts, or take fewer steps "
        "or a smaller student.",
    ]


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
    for name, style, suffix in (("kl", "-", ""), ("held_out", "--", ", held out")):
        known = [entry for entry in history if name in entry]
        steps = [entry["step"] for entry in known]
        for draft_index in range(len(known[0][name]) if known else 0):
            values = [entry[name][draft_index] for entry in known]
            label = f"{draft_index + 1} ahead{suffix}"
            axes.plot(steps, values, style, color=f"C{draft_index}", label=label)
    axes.set(xlabel="step", ylabel="KL of student from target", yscale="log")
    axes.legend()
    figure.tight_layout()
    write_whole(path, lambda file: figure.savefig(file, format="png"))
    pyplot.close(figure)
