"""The prompts that the bundled proposers were distilled with, made of public sets.

    python examples/distill/prompts.py FOLDER prompts.jsonl.gz

FOLDER holds clones (or copies of the files named below) of these repositories:

    grade-school-math   openai/grade-school-math, MIT: the train split of GSM8K
    self-instruct       yizhongw/self-instruct, Apache-2.0: 50,000 prompts of P3, train splits
    natural-questions   google-research-datasets/natural-questions, Apache-2.0: EfficientQA
    UD_German-GSD       UniversalDependencies, CC BY-SA 4.0: German sentences
    UD_German-PUD       UniversalDependencies, CC BY-SA 3.0: German sentences
    GPTeacher           teknium1/GPTeacher, MIT: instructions about code, and for playing a part

Only what a user asks is taken: the target writes the answers. Nothing of it is in Spec-Bench,
HumanEval, MBPP, Arena-Hard or OASST: prompts that Spec-Bench has as well are left out.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

SPEC_BENCH = Path(__file__).parents[2] / "loadtest" / "data" / "spec_bench" / "question.jsonl"
P3 = "self-instruct/data/finetuning/t0_train_50k/data_per_template"
NEWS = ("cnn_dailymail", "xsum", "multi_news", "samsum")
READING = ("adversarial_qa", "quoref", "ropes", "duorc", "wiki_hop", "cosmos_qa", "dream", "quail")
QUESTIONS = ("wiki_qa", "kilt_tasks", "trec", "sciq_Direct", "qasc", "commonsense_qa")
TRANSLATIONS = (
    "Translate German to English: {}",
    "Translate German to English: {}",
    "Translate the following sentence from German into English.\n\n{}",
    "What does this mean in English? {}",
)
SUMMARIES = ("Summarize: {}", "Summarize: {}", "Summarize the following article.\n\n{}")
MOST = 8000  # of a kind
LONGEST = 6500  # characters: what fits into a context of 2,048 tokens with an answer
Row = tuple[str, str]


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    rng = random.Random(0)
    kept_out = {_plain(turn) for row in _json_lines(SPEC_BENCH) for turn in row["turns"]}
    rows = [
        *_maths(folder),
        *_translations(folder, rng),
        *_questions(folder),
        *_instructions(folder),
        *_texts(folder, rng),
    ]
    rng.shuffle(rows)
    seen: set[str] = set()
    taken: Counter[str] = Counter()
    with _opened(out) as file:
        for category, prompt in rows:
            plain = _plain(prompt)
            if plain in seen or plain in kept_out or not plain or taken[category] == MOST:
                continue
            seen.add(plain)
            taken[category] += 1
            file.write(json.dumps({"prompt": prompt[:LONGEST], "category": category}) + "\n")
    print(f"{len(seen)} prompts are in {out}")


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "wt", encoding="utf-8")
    return path.open("w", encoding="utf-8")


def _maths(folder: Path) -> Iterator[Row]:
    for row in _json_lines(folder / "grade-school-math/grade_school_math/data/train.jsonl"):
        yield "maths", row["question"]


def _translations(folder: Path, rng: random.Random) -> Iterator[Row]:
    for name in ("UD_German-GSD", "UD_German-PUD"):
        for path in sorted((folder / name).glob("*.conllu")):
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.startswith("# text = ") and len(line) > 40:
                    sentence = line.partition(" = ")[2]
                    for template in rng.sample(TRANSLATIONS, 2):
                        yield "translation", template.format(sentence)


def _questions(folder: Path) -> Iterator[Row]:
    for path in sorted((folder / "natural-questions/nq_open").glob("*efficientqa*1.1.jsonl")):
        for row in _json_lines(path):
            yield "questions", row["question"][:1].upper() + row["question"][1:] + "?"
    for row in _p3(folder, QUESTIONS):
        if len(row) < 400:
            yield "questions", row


def _instructions(folder: Path) -> Iterator[Row]:
    files = {
        "code": "Codegen/codegen-instruct.json",
        "roles": "Roleplay/roleplay-simple-deduped-roleplay-instruct.json",
    }
    for category, name in files.items():
        for row in json.loads((folder / "GPTeacher" / name).read_text(encoding="utf-8")):
            yield category, "\n\n".join(part for part in (row["instruction"], row["input"]) if part)


def _texts(folder: Path, rng: random.Random) -> Iterator[Row]:
    """To be summarised, and passages with a question behind them, which come from elsewhere too."""
    for prompt in _p3(folder, NEWS):
        article = max(prompt.split("\n\n"), key=len)
        if len(article) > 600:
            length = rng.randint(600, LONGEST)
            yield "summaries", rng.choice(SUMMARIES).format(article[:length])
        yield "summaries", prompt
    asked = [prompt for prompt in _p3(folder, READING) if len(prompt) < LONGEST]
    passages = [p for prompt in asked for p in prompt.split("\n") if 300 < len(p) < 1500]
    for prompt in asked:
        others = rng.sample(passages, rng.choice((0, 0, 1, 2, 3, 4)))
        room = LONGEST - len(prompt)
        before = "\n".join(others)[: max(room, 0)]
        yield "reading", f"{before}\n{prompt}" if before else prompt


def _p3(folder: Path, kinds: Iterable[str]) -> Iterator[str]:
    for kind in kinds:
        for path in sorted((folder / P3).glob(f"{kind}*.jsonl")):
            for row in _json_lines(path):
                yield row["prompt"].strip()


def _json_lines(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


if __name__ == "__main__":
    main()
