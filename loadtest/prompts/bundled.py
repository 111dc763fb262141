"""The bundled datasets; `loadtest/data/*/SOURCE.txt` names the source of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from outrider.errors import ConfigError
from outrider.input_files import json_rows
from outrider.loadtest.bundled_data import DATA
from outrider.loadtest.prompts.entries import DatasetEntry, DatasetOptions
from outrider.loadtest.prompts.rows import entry_of, messages_of
from outrider.loadtest.requests import USER, Prompt

SPEC_BENCH = DATA / "spec_bench" / "question.jsonl"
MT_BENCH = "mt_bench"
# Spec-Bench's file lists MT-Bench under its own eight categories, ten questions each.
MT_BENCH_CATEGORIES = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)
EAGLE_SETS = {
    "alpaca": "alpaca.jsonl",
    "gsm8k": "gsm8k.jsonl",
    "humaneval": "humaneval.jsonl",
    "qa": "qa.jsonl",
    "sum": "sum.jsonl.gz",
}
ROW = "the file as it was bundled"

Row = dict[str, Any]


def group_of(category: str) -> str:
    """The Spec-Bench task of a category of its file."""
    return MT_BENCH if category in MT_BENCH_CATEGORIES else category


def _rows(
    file: str, read: Callable[[Row, str, str], DatasetEntry]
) -> Callable[[], Iterator[DatasetEntry]]:
    """A reader of a bundled file; `read` gets the row, its location and its index."""

    def reader() -> Iterator[DatasetEntry]:
        for number, (where, row) in enumerate(json_rows(DATA / file, ROW)):
            try:
                yield read(row, where, str(number))
            except (KeyError, TypeError):
                raise ConfigError(f"{where} is damaged; restore {ROW}.") from None

    return reader


def _question(row: Row, where: str, number: str) -> DatasetEntry:
    return entry_of(row, where, own_id=number, category="general")


def _humaneval(row: Row, where: str, number: str) -> DatasetEntry:
    """Plain completion, as the dataset intends; `eagle:humaneval` has it as chat."""
    own_id = str(row["task_id"]).removeprefix("HumanEval/")
    return DatasetEntry(
        Prompt(id=own_id, category="humaneval", text=row["prompt"]), row["canonical_solution"]
    )


def _gsm8k(row: Row, where: str, number: str) -> DatasetEntry:
    prompt = Prompt(id=number, category="gsm8k", turns=(row["question"],))
    return DatasetEntry(prompt, row["answer"])


def _mbpp(row: Row, where: str, number: str) -> DatasetEntry:
    tests = "\n".join(row["test_list"])
    question = f"{row['text']}\nYour code should pass these tests:\n\n{tests}"
    return DatasetEntry(
        Prompt(id=str(row["task_id"]), category="mbpp", turns=(question,)), row["code"]
    )


def _arena_hard(row: Row, where: str, number: str) -> DatasetEntry:
    """A single category: its 250 clusters have only two questions each."""
    return entry_of({**row, "category": None}, where, own_id=number, category="arena-hard")


def _oasst(row: Row, where: str, number: str) -> DatasetEntry:
    """User messages only; the model under test writes the replies between them."""
    turns = [each.content for each in messages_of(row["messages"], where) if each.role == USER]
    answer = row["reference"] if len(turns) == 1 else None
    return DatasetEntry(Prompt(id=row["id"], category="oasst", turns=tuple(turns)), answer)


def _eagle() -> Iterator[DatasetEntry]:
    for name, file in EAGLE_SETS.items():
        for number, (where, row) in enumerate(json_rows(DATA / "eagle_bench" / file, ROW)):
            own_id = f"{name}-{row.get('question_id', number)}"
            entry = entry_of(
                {**row, "question_id": own_id, "category": name}, where, own_id=own_id, category=""
            )
            yield DatasetEntry(entry.prompt, (row.get("reference") or [None])[0])


SETS: dict[str, Callable[[], Iterator[DatasetEntry]]] = {
    "mt-bench": _rows("mt_bench/question.jsonl", _question),
    "humaneval": _rows("humaneval/HumanEval.jsonl.gz", _humaneval),
    "gsm8k": _rows("gsm8k/test.jsonl.gz", _gsm8k),
    "mbpp": _rows("mbpp/mbpp.jsonl.gz", _mbpp),
    "arena-hard": _rows("arena_hard/question.jsonl.gz", _arena_hard),
    "vicuna": _rows("vicuna_bench/question.jsonl", _question),
    "oasst": _rows("oasst_multiturn/oasst1_en.jsonl.gz", _oasst),
    "eagle": _eagle,
}


def read_bundled(name: str, options: DatasetOptions) -> list[DatasetEntry]:
    """A dataset, or the named categories of it, as `mt-bench:writing+coding`."""
    return _selected(name, SETS[name](), options.argument, group=lambda category: category)


def read_spec_bench(options: DatasetOptions) -> list[DatasetEntry]:
    """Spec-Bench by its six tasks; `spec-bench:translation+writing` selects tasks or categories."""
    rows = _rows("spec_bench/question.jsonl", _question)()
    return _selected("spec-bench", rows, options.argument, group=group_of)


def _selected(
    name: str, entries: Iterable[DatasetEntry], argument: str, group: Callable[[str], str]
) -> list[DatasetEntry]:
    """Entries whose category or group is selected, under the selected name as their category."""
    chosen = [_plain(each) for each in argument.split("+") if each.strip()]
    kept, known = [], set()
    for each in entries:
        own = each.prompt.category
        names = {_plain(own): own, _plain(group(own)): group(own)}
        known |= set(names)
        chosen_by = [names[label] for label in names if label in chosen]
        if chosen_by or not chosen:
            kept.append(_in_category(each, chosen_by[0] if chosen else group(own)))
    unknown = [label for label in chosen if label not in known]
    if unknown:
        raise ConfigError(
            f"{name} has no category {unknown[0]!r}; choose from {', '.join(sorted(known))}."
        )
    return kept


def _plain(name: str) -> str:
    """Normalizes spelling: mt-bench and mt_bench are the same."""
    return name.strip().lower().replace("-", "_")


def _in_category(entry: DatasetEntry, category: str) -> DatasetEntry:
    if entry.prompt.category == category:
        return entry
    return dataclasses.replace(entry, prompt=dataclasses.replace(entry.prompt, category=category))
