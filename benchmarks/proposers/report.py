"""Tables of the results, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from outrider.acceptance_tables import upper_end
from outrider.benchmarks.proposers.prompts import ALL_GROUPS

Record = dict[str, Any]
_MODES = ("greedy", "sampled")
_TITLES = {
    "enlarged_short": "Enlarged to the 8B shape, short prompts",
    "enlarged_long": "Enlarged to the 8B shape, long prompts",
}


def markdown(figures: Mapping[str, Any]) -> str:
    """All tables that have results."""
    sections = [
        section
        for mode in _MODES
        for section in (
            *_rounds(figures.get("rounds", {}), mode),
            *_speed(figures.get("speed", {}), mode),
            *_enlarged(figures, mode),
        )
    ]
    return "\n\n".join(sections) + "\n" if sections else "Nothing was measured yet.\n"


def name_of(record: Mapping[str, Any]) -> str:
    return f"{record['proposer']}, depth {record['depth']}" if record["depth"] else "plain"


def _records(part: Mapping[str, Any], mode: str) -> list[Record]:
    return [record for record in part.get("records", ()) if mode in record]


def _about(part: Mapping[str, Any], mode: str) -> str:
    """The conditions of a part, in a sentence."""
    about = part["about"]
    text = (
        f"{about['device']}, {about['prompts']} prompts of {about['mean_prompt_tokens']} tokens on "
        f"average, {about['output_tokens']} output tokens"
    )
    return f"{text}, temperature {about['temperature']}." if mode == "sampled" else f"{text}."


def _rounds(part: Mapping[str, Any], mode: str) -> list[str]:
    found = _records(part, mode)
    drafted = [record for record in found if record["depth"]]
    if not drafted:
        return []
    summary = _table(
        ["proposer", "tokens a round", "drafts accepted", "texts equal to plain"],
        (
            [
                name_of(record),
                f"{record[mode]['all']['tokens_a_round']:.2f}",
                f"{record[mode]['all']['acceptance']:.0%}",
                _equal(record[mode]),
            ]
            for record in drafted
        ),
    )
    return [
        f"### Tokens a round, {mode}",
        _about(part, mode),
        summary,
        *_by("category", drafted, mode, "tokens_a_round", "{:.2f}"),
        *_by("prompt length", drafted, mode, "tokens_a_round", "{:.2f}"),
    ]


def _speed(part: Mapping[str, Any], mode: str) -> list[str]:
    found = _records(part, mode)
    if not found:
        return []
    plain = next((record[mode] for record in found if not record["depth"]), None)
    rows = []
    for record in found:
        own = record[mode]["all"]
        over = "" if plain is None else f"{_over(own, plain['all']):.2f}"
        rows.append(
            [
                name_of(record),
                f"{own['decoding_tokens_per_s']:.1f}",
                f"{own['whole_tokens_per_s']:.1f}",
                over,
                f"{own['draft_share']:.0%}",
                f"{own['draft_ms']:.2f}",
                f"{own['verify_ms']:.2f}",
                _equal(record[mode]),
            ]
        )
    heading = ["proposer", "tokens/s, decoding", "whole calls", "decoding over plain"]
    heading += ["draft share", "draft, ms", "verify, ms", "texts equal to plain"]
    title = f"### One request at a time, {mode}"
    sections = [title, _about(part, mode), _table(heading, rows)]
    if plain is not None:
        drafted = [record for record in found if record["depth"]]
        for what in ("category", "prompt length"):
            field = _field(what)

            def over_plain(own: Record, group: str, field: str = field) -> float:
                return _over(own[field][group], plain[field][group])

            sections += _by(what, drafted, mode, "", "{:.2f}", over_plain)
    return sections


def _enlarged(figures: Mapping[str, Any], mode: str) -> list[str]:
    sections = []
    for part, title in _TITLES.items():
        found = _records(figures.get(part, {}), mode)
        if not found:
            continue
        best = _best_depths(found, mode)
        rows = []
        for record in found:
            own = record[mode]
            time = f"{own['ms_per_token']:.2f}"
            is_best = best[record["proposer"]] == record["depth"] and record["depth"] > 0
            rows.append(
                [
                    name_of(record),
                    f"{own['tokens_a_round']:.2f}",
                    f"**{time}**" if is_best else time,
                    f"{own['draft_ms']:.2f}",
                    f"{own['verify_ms']:.2f}",
                    f"{own['host_ms']:.3f}",
                    _equal(own),
                ]
            )
        heading = ["proposer", "tokens a round", "ms per token", "draft, ms", "verify, ms"]
        heading += ["host, ms", "texts equal to plain"]
        sections += [f"### {title}, {mode}", _about(figures[part], mode), _table(heading, rows)]
    return sections


def _best_depths(records: Iterable[Record], mode: str) -> dict[str, int]:
    """The depth of each proposer with the least time per token."""
    best: dict[str, Record] = {}
    for record in records:
        name = record["proposer"]
        if name not in best or record[mode]["ms_per_token"] < best[name][mode]["ms_per_token"]:
            best[name] = record
    return {name: record["depth"] for name, record in best.items()}


def _by(
    what: str,
    records: Sequence[Record],
    mode: str,
    figure: str,
    form: str,
    value: Callable[[Record, str], float] | None = None,
) -> list[str]:
    """A row for each group of prompts, a column for each proposer."""
    field = _field(what)
    groups = _ordered({name for record in records for name in record[mode][field]}, what)
    rows = [
        [
            group,
            *(
                form.format(
                    value(record[mode], group) if value else record[mode][field][group][figure]
                )
                for record in records
            ),
        ]
        for group in groups
    ]
    title = f"By {what}" + (", decoding over plain:" if value else ":")
    return [title, _table([what, *map(name_of, records)], rows)]


def _field(what: str) -> str:
    return f"by_{what.replace(' ', '_')}"


def _ordered(groups: set[str], what: str) -> list[str]:
    if what == "prompt length":
        return sorted(groups, key=upper_end)
    return sorted(groups, key=lambda name: ALL_GROUPS.index(name) if name in ALL_GROUPS else 99)


def _over(own: Mapping[str, float], plain: Mapping[str, float]) -> float:
    return own["decoding_tokens_per_s"] / plain["decoding_tokens_per_s"]


def _equal(found: Mapping[str, Any]) -> str:
    return f"{found['same_texts']} of {found['texts']}"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = "|".join(["", "---", *("---:" for _ in heading[1:]), ""])
    lines = [f"| {' | '.join(line)} |" for line in (heading, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])
