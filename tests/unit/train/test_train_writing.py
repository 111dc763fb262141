"""Conversations that a target writes: who speaks when, how long, and always the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from distill_tools import save_toy_tokenizer

from outrider.scheduler.params import SamplingParams
from outrider.text.tokenizer import load_tokenizer
from outrider.train.dialogues import Template
from outrider.train.settings import DataSettings
from outrider.train.sources import SourceTexts
from outrider.train.writing import CONTINUATION_KIND, CONVERSATION_KIND, QUESTION_KIND, Writer

PAD, BEGIN, END, USER, BOT = range(5)
SETTINGS = DataSettings(context=64, user_tokens=6, answer_tokens=10, document_share=0.4)
TEXT = " ".join(f"w{number}" for number in range(30)) * 4


class Babbler:
    """Says as much as a seed lets it, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], SamplingParams]] = []

    def complete(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[int]]:
        self.asked += [(list(ids), own) for ids, own in zip(prompts, params, strict=True)]
        return [self._say(own) for own in params]

    def _say(self, params: SamplingParams) -> list[int]:
        rng = random.Random(params.seed)
        assert params.max_tokens is not None
        said = [rng.randint(5, 39) for _ in range(rng.randint(1, 12))]
        return [*said, END][: params.max_tokens]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_toy_tokenizer(folder)
    return load_tokenizer(folder)


def writer(tokenizer: Any, completer: Babbler, **pools: SourceTexts) -> Writer:
    template = Template.of(tokenizer, (END,))
    prompts, documents = pools.get("prompts", SourceTexts()), pools.get("documents", SourceTexts())
    return Writer(completer, tokenizer, template, SETTINGS, (END,), prompts, documents)


def test_a_template_is_cut_where_users_and_model_speak(tokenizer: Any) -> None:
    template = Template.of(tokenizer, (END,))
    assert template == Template((BEGIN, USER), (END, BOT), (END, USER), (END,))


def test_conversations_are_of_turns_and_stay_within_the_context(tokenizer: Any) -> None:
    records = writer(tokenizer, Babbler()).write(0, 60, held_out=False)
    assert len(records) > 50
    for record in records:
        ids = record.ids.tolist()
        assert ids[:2] == [BEGIN, USER] and len(ids) <= SETTINGS.context
        assert ids[record.begin - 2 : record.begin] == [END, BOT]
        assert ids.count(USER) - ids.count(BOT) in (0, 1)
    assert max(record.ids.tolist().count(BOT) for record in records) > 1


def test_users_speak_at_temperature_1_and_answers_are_mixed(tokenizer: Any) -> None:
    completer = Babbler()
    writer(tokenizer, completer).write(0, 60, held_out=False)
    users = {own.temperature for ids, own in completer.asked if ids[-1] == USER}
    answers = {own.temperature for ids, own in completer.asked if ids[-1] == BOT}
    assert users == {1.0} and {0.0, 1.0} < answers


def test_a_shard_is_the_same_whenever_it_is_written_and_unlike_the_next(tokenizer: Any) -> None:
    def text(shard: int, held_out: bool = False) -> list[list[int]]:
        made = writer(tokenizer, Babbler()).write(shard, 8, held_out)
        return [record.ids.tolist() for record in made]

    assert text(3) == text(3)
    assert text(3) != text(4) and text(0) != text(0, held_out=True)


def test_documents_are_continued_and_asked_about_at_many_lengths(tokenizer: Any) -> None:
    pool = SourceTexts([("document", TEXT)])
    made = writer(tokenizer, Babbler(), documents=pool)
    records = made.write(0, 200, held_out=False)
    kinds = [made.kinds[record.kind] for record in records]
    assert {CONVERSATION_KIND, CONTINUATION_KIND, QUESTION_KIND} == set(kinds)
    lengths = {r.begin for r, kind in zip(records, kinds, strict=True) if kind == CONTINUATION_KIND}
    assert len(lengths) > 8 and max(lengths) <= SETTINGS.context - 1
    asked = [r for r, kind in zip(records, kinds, strict=True) if kind == QUESTION_KIND]
    assert all(r.ids.tolist()[:2] == [BEGIN, USER] for r in asked)


def test_given_prompts_are_answered_under_their_own_kind(tokenizer: Any) -> None:
    made = writer(tokenizer, Babbler(), prompts=SourceTexts([("maths", "w1 w2 w3")]))
    records = made.write(0, 60, held_out=False)
    given = [r for r in records if made.kinds[r.kind] == "maths"]
    first = tokenizer.encode("w1 w2 w3", add_special_tokens=False)
    assert given and all(
        r.ids.tolist()[: r.begin] == [BEGIN, USER, *first, END, BOT] for r in given
    )


def test_without_a_template_texts_begin_as_texts_do(tokenizer: Any, tmp_path: Path) -> None:
    made = Writer(Babbler(), tokenizer, None, SETTINGS, (END,), SourceTexts(), SourceTexts())
    records = made.write(0, 10, held_out=False)
    assert records and all(r.begin == 1 and r.ids[0] == BEGIN for r in records)


def test_some_answers_go_on_behind_their_end(tokenizer: Any) -> None:
    completer = Babbler()
    writer(tokenizer, completer).write(0, 60, held_out=False)
    answers = [own for ids, own in completer.asked if ids[-1] == BOT]
    past = [own for own in answers if own.ignore_eos]
    assert 0 < len(past) < len(answers) / 2
    assert not any(own.stop_token_ids for own in past)
    assert not any(own.ignore_eos for ids, own in completer.asked if ids[-1] == USER)
