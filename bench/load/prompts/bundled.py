"""The sets that come with the code; `bench/data/*/SOURCE.txt` says where each is from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from outrider.bench.load.asks import USER, Prompt
from outrider.bench.load.files import DATA, json_rows
from outrider.bench.load.prompts.found import Found, Wanted
from outrider.bench.load.prompts.rows import found_in, messages_of
from outrider.errors import ConfigError

SPEC_BENCH = DATA / "spec_bench" / "question.jsonl"
MT_BENCH = "mt_bench"
# In Spec-Bench's file MT-Bench appears under its own eight categories, ten questions each.
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
    """The task of Spec-Bench that a category of its file belongs to."""
    return MT_BENCH if category in MT_BENCH_CATEGORIES else category


def _rows(file: str, read: Callable[[Row, str, str], Found]) -> Callable[[], Iterator[Found]]:
    """A reader of a bundled file; `read` is given the row, its place and its number from 0."""

    def reader() -> Iterator[Found]:
        for number, (where, row) in enumerate(json_rows(DATA / file, ROW)):
            try:
                yield read(row, where, str(number))
            except (KeyError, TypeError):
                raise ConfigError(f"{where} is damaged; restore {ROW}.") from None

    return reader


def _question(row: Row, where: str, number: str) -> Found:
    return found_in(row, where, own_id=number, category="general")


def _humaneval(row: Row, where: str, number: str) -> Found:
    """Continued as it is: the set was made for completion. `eagle:humaneval` asks in a chat."""
    own_id = str(row["task_id"]).removeprefix("HumanEval/")
    return Found(
        Prompt(id=own_id, category="humaneval", text=row["prompt"]), row["canonical_solution"]
    )


def _gsm8k(row: Row, where: str, number: str) -> Found:
    prompt = Prompt(id=number, category="gsm8k", turns=(row["question"],))
    return Found(prompt, row["answer"])


def _mbpp(row: Row, where: str, number: str) -> Found:
    tests = "\n".join(row["test_list"])
    asked = f"{row['text']}\nYour code should pass these tests:\n\n{tests}"
    return Found(Prompt(id=str(row["task_id"]), category="mbpp", turns=(asked,)), row["code"])


def _arena_hard(row: Row, where: str, number: str) -> Found:
    """One category: its 250 clusters have two questions each."""
    return found_in({**row, "category": None}, where, own_id=number, category="arena-hard")


def _oasst(row: Row, where: str, number: str) -> Found:
    """All the user says, so that the model's own answers come between."""
    said = [each.content for each in messages_of(row["messages"], where) if each.role == USER]
    answer = row["reference"] if len(said) == 1 else None
    return Found(Prompt(id=row["id"], category="oasst", turns=tuple(said)), answer)


def _eagle() -> Iterator[Found]:
    for name, file in EAGLE_SETS.items():
        for number, (where, row) in enumerate(json_rows(DATA / "eagle_bench" / file, ROW)):
            own_id = f"{name}-{row.get('question_id', number)}"
            found = found_in(
                {**row, "question_id": own_id, "category": name}, where, own_id=own_id, category=""
            )
            yield Found(found.prompt, (row.get("reference") or [None])[0])


SETS: dict[str, Callable[[], Iterator[Found]]] = {
    "mt-bench": _rows("mt_bench/question.jsonl", _question),
    "humaneval": _rows("humaneval/HumanEval.jsonl.gz", _humaneval),
    "gsm8k": _rows("gsm8k/test.jsonl.gz", _gsm8k),
    "mbpp": _rows("mbpp/mbpp.jsonl.gz", _mbpp),
    "arena-hard": _rows("arena_hard/question.jsonl.gz", _arena_hard),
    "vicuna": _rows("vicuna_bench/question.jsonl", _question),
    "oasst": _rows("oasst_multiturn/oasst1_en.jsonl.gz", _oasst),
    "eagle": _eagle,
}


def read_bundled(name: str, wanted: Wanted) -> list[Found]:
    """A set, or those of its categories that are named, as `mt-bench:writing+coding`."""
    return _selected(name, SETS[name](), wanted.argument, group=lambda category: category)


def read_spec_bench(wanted: Wanted) -> list[Found]:
    """Spec-Bench by its six tasks; `spec-bench:translation+writing` names tasks or categories."""
    rows = _rows("spec_bench/question.jsonl", _question)()
    return _selected("spec-bench", rows, wanted.argument, group=group_of)


def _selected(
    name: str, found: Iterable[Found], argument: str, group: Callable[[str], str]
) -> list[Found]:
    """Prompts whose category or group is named; their category is the name that chose them."""
    chosen = [_plain(each) for each in argument.split("+") if each.strip()]
    kept, known = [], set()
    for each in found:
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
    """Names are found however they are written: mt-bench, mt_bench."""
    return name.strip().lower().replace("-", "_")


def _in_category(found: Found, category: str) -> Found:
    if found.prompt.category == category:
        return found
    return dataclasses.replace(found, prompt=dataclasses.replace(found.prompt, category=category))
