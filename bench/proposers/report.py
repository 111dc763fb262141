"""Tables of what was measured, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from outrider.bench.proposers.prompts import ALL_GROUPS
from outrider.train.tallies import upper_end

Record = dict[str, Any]
_HOW = ("greedy", "sampled")
_TITLES = {
    "enlarged_short": "Enlarged to the 8B shape, short prompts",
    "enlarged_long": "Enlarged to the 8B shape, long prompts",
}


def markdown(figures: Mapping[str, Any]) -> str:
    """All tables there are figures for."""
    sections = [
        section
        for how in _HOW
        for section in (
            *_rounds(figures.get("rounds", {}), how),
            *_speed(figures.get("speed", {}), how),
            *_enlarged(figures, how),
        )
    ]
    return "\n\n".join(sections) + "\n" if sections else "Nothing was measured yet.\n"


def name_of(record: Mapping[str, Any]) -> str:
    return f"{record['proposer']}, depth {record['depth']}" if record["depth"] else "plain"


def _records(part: Mapping[str, Any], how: str) -> list[Record]:
    return [record for record in part.get("records", ()) if how in record]


def _about(part: Mapping[str, Any], how: str) -> str:
    """Under which circumstances, in a sentence."""
    about = part["about"]
    text = (
        f"{about['device']}, {about['prompts']} prompts of {about['mean_prompt_tokens']} tokens on "
        f"average, {about['output_tokens']} output tokens"
    )
    return f"{text}, temperature {about['temperature']}." if how == "sampled" else f"{text}."


def _rounds(part: Mapping[str, Any], how: str) -> list[str]:
    found = _records(part, how)
    drafted = [record for record in found if record["depth"]]
    if not drafted:
        return []
    summary = _table(
        ["proposer", "tokens a round", "drafts accepted", "texts equal to plain"],
        (
            [
                name_of(record),
                f"{record[how]['all']['tokens_a_round']:.2f}",
                f"{record[how]['all']['acceptance']:.0%}",
                _equal(record[how]),
            ]
            for record in drafted
        ),
    )
    return [
        f"### Tokens a round, {how}",
        _about(part, how),
        summary,
        *_by("category", drafted, how, "tokens_a_round", "{:.2f}"),
        *_by("prompt length", drafted, how, "tokens_a_round", "{:.2f}"),
    ]


def _speed(part: Mapping[str, Any], how: str) -> list[str]:
    found = _records(part, how)
    if not found:
        return []
    plain = next((record[how] for record in found if not record["depth"]), None)
    rows = []
    for record in found:
        own = record[how]["all"]
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
                _equal(record[how]),
            ]
        )
    heading = ["proposer", "tokens/s, decoding", "whole calls", "decoding over plain"]
    heading += ["draft share", "draft, ms", "verify, ms", "texts equal to plain"]
    title = f"### One request at a time, {how}"
    sections = [title, _about(part, how), _table(heading, rows)]
    if plain is not None:
        drafted = [record for record in found if record["depth"]]
        for what in ("category", "prompt length"):
            field = _field(what)

            def over_plain(own: Record, group: str, field: str = field) -> float:
                return _over(own[field][group], plain[field][group])

            sections += _by(what, drafted, how, "", "{:.2f}", over_plain)
    return sections


def _enlarged(figures: Mapping[str, Any], how: str) -> list[str]:
    sections = []
    for part, title in _TITLES.items():
        found = _records(figures.get(part, {}), how)
        if not found:
            continue
        best = _best_depths(found, how)
        rows = []
        for record in found:
            own = record[how]
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
        sections += [f"### {title}, {how}", _about(figures[part], how), _table(heading, rows)]
    return sections


def _best_depths(records: Iterable[Record], how: str) -> dict[str, int]:
    """Of each proposer, where a token takes the least time."""
    best: dict[str, Record] = {}
    for record in records:
        name = record["proposer"]
        if name not in best or record[how]["ms_per_token"] < best[name][how]["ms_per_token"]:
            best[name] = record
    return {name: record["depth"] for name, record in best.items()}


def _by(
    what: str,
    records: Sequence[Record],
    how: str,
    figure: str,
    form: str,
    value: Callable[[Record, str], float] | None = None,
) -> list[str]:
    """A row for each group of prompts, a column for each proposer."""
    field = _field(what)
    groups = _ordered({name for record in records for name in record[how][field]}, what)
    rows = [
        [
            group,
            *(
                form.format(
                    value(record[how], group) if value else record[how][field][group][figure]
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
