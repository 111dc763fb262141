"""docs/http.md lists the fields that the schema has. Run as a program, this file writes them."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.gateway.http.fields import (
    IGNORED,
    REFUSED,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    Refusal,
)
from outrider.gateway.http.schemas import ChatRequest, CompletionRequest

DOCS = Path(__file__).resolve().parents[3] / "docs" / "http.md"
BEGIN = "<!-- fields: written by tests/unit/gateway/test_http_docs.py -->\n"
END = "<!-- end of fields -->\n"


def accepted_table() -> str:
    lines = ["| accepted | in | meaning |", "| --- | --- | --- |"]
    completion, chat = CompletionRequest.model_fields, ChatRequest.model_fields
    for name in sorted(completion | chat):
        places = [("completions", completion), ("chat", chat)]
        for meaning in dict.fromkeys(f[name].description for _, f in places if name in f):
            where = [p for p, f in places if name in f and f[name].description == meaning]
            lines.append(f"| `{name}` | {'both' if len(where) == 2 else where[0]} | {meaning} |")
    return "\n".join(lines)


def refused_table() -> str:
    lines = ["| refused | in | unless it is | because this is not supported |"]
    lines.append("| --- | --- | --- | --- |")
    rows: list[tuple[str, str, Refusal]] = [(n, "both", r) for n, r in REFUSED.items()]
    rows += [(name, "completions", r) for name, r in REFUSED_IN_COMPLETIONS.items()]
    rows += [(name, "chat", r) for name, r in REFUSED_IN_CHAT.items()]
    for name, where, refusal in sorted(rows, key=lambda row: row[:2]):
        fine = ", ".join(f"`{json.dumps(value)}`" for value in refusal.harmless)
        if refusal.switch:
            fine += f', or `{refusal.switch}` is `"none"`'
        lines.append(f"| `{name}` | {where} | {fine} | {refusal.what} |")
    return "\n".join(lines)


def tables() -> str:
    ignored = ", ".join(f"`{name}`" for name in sorted(IGNORED))
    return f"{accepted_table()}\n\nIgnored: {ignored}.\n\n{refused_table()}\n"


def test_the_documentation_lists_every_field() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == tables(), f"run {__file__}"


def test_no_field_is_both_accepted_and_not() -> None:
    for kind, more in (
        (CompletionRequest, REFUSED_IN_COMPLETIONS),
        (ChatRequest, REFUSED_IN_CHAT),
    ):
        assert set(kind.model_fields).isdisjoint(REFUSED.keys() | more.keys() | IGNORED)
        assert (REFUSED.keys() | more.keys()).isdisjoint(IGNORED)


if __name__ == "__main__":
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCS.write_text(f"{before}{BEGIN}{tables()}{END}{after}", encoding="utf-8")
