"""Lets the target write conversations: the user turns and its answers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from outrider.errors import ConfigError
from outrider.scheduler.params import SamplingParams
from outrider.text.tokenizer import Tokenizer
from outrider.train.dialogues import Template
from outrider.train.settings import DataSettings
from outrider.train.shards import TrainingRecord
from outrider.train.sources import SourceTexts

CONVERSATION_KIND, CONTINUATION_KIND, QUESTION_KIND = (
    "conversation",
    "document continued",
    "document asked about",
)
MAX_TURNS = 8
ANSWER_TEMPERATURES = (0.0, 0.0, 0.3, 0.7, 1.0, 1.0)
USER_TEMPERATURE = 1.0
SHORTEST_GOAL = 48
# The share of conversations whose answer ignores end-of-text, as load tests with fixed lengths do.
PAST_END = 0.15
QUESTIONS = (
    "Summarize the text above.",
    "What is the main point of this text?",
    "List the most important facts of the text.",
    "Rewrite the text above in simpler words.",
    "Write a title and a short abstract for this text.",
    "Explain the text above to a beginner.",
    "Who or what is the text about, and what happens?",
    "Continue the text above.",
)


class Completer(Protocol):
    """Completes prompts of token ids."""

    def complete(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[int]]: ...


@dataclass(slots=True)
class _Dialogue:
    """A conversation being written. It ends at length `goal`; the user has the next turn unless
    `is_answered_next`."""

    ids: list[int]
    kind: str
    goal: int
    temperature: float
    seed: int
    is_answered_next: bool
    ignore_eos: bool = False
    begin: int | None = None
    num_turns: int = 0
    is_over: bool = False


@dataclass(slots=True)
class Writer:
    """Writes records; a text depends on the settings' seed and its shard and index only."""

    completer: Completer
    tokenizer: Tokenizer
    template: Template | None
    settings: DataSettings
    eos_ids: tuple[int, ...]
    prompts: SourceTexts
    documents: SourceTexts
    kinds: list[str] = field(init=False)

    def __post_init__(self) -> None:
        given = sorted({kind for kind, _ in self.prompts.items})
        kinds = [CONTINUATION_KIND, QUESTION_KIND] if self.documents.items else []
        self.kinds = [
            CONVERSATION_KIND,
            *kinds,
            *(kind for kind in given if kind not in (CONVERSATION_KIND, *kinds)),
        ]

    def write(
        self,
        shard: int,
        count: int,
        held_out: bool,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[TrainingRecord]:
        """At most `count` records of shard number `shard`; empty ones are dropped."""
        rng = random.Random(f"{self.settings.seed}/{'held-out' if held_out else shard}")
        documents, prompts = self.documents.part(held_out), self.prompts.part(held_out)
        dialogues = [self._begin(rng, documents, prompts) for _ in range(count)]
        for _ in range(2 * MAX_TURNS):
            self._user_turns([d for d in dialogues if not d.is_over and not d.is_answered_next])
            self._answers([d for d in dialogues if not d.is_over and d.is_answered_next])
            if on_progress is not None:
                on_progress(sum(d.is_over for d in dialogues))
            if all(d.is_over for d in dialogues):
                break
        return [
            TrainingRecord(np.array(d.ids), d.begin, self.kinds.index(d.kind))
            for d in dialogues
            if d.begin is not None and len(d.ids) > d.begin
        ]

    def _begin(
        self,
        rng: random.Random,
        documents: Sequence[tuple[str, str]],
        prompts: Sequence[tuple[str, str]],
    ) -> _Dialogue:
        settings = self.settings
        drawn, seed = rng.random(), rng.getrandbits(48)
        longest = math.log(settings.context)
        goal = int(math.exp(rng.uniform(math.log(min(SHORTEST_GOAL, settings.context)), longest)))
        temperature = rng.choice(ANSWER_TEMPERATURES)
        ignore_eos = rng.random() < PAST_END
        if documents and drawn < settings.document_share:
            ids, kind, is_ready = self._of_document(rng, rng.choice(documents)[1])
            return _Dialogue(ids, kind, 0, temperature, seed, is_ready, ignore_eos)
        if prompts and drawn < settings.document_share + settings.prompt_share:
            kind, text = rng.choice(prompts)
            ids = self._as_chat(text)
            return _Dialogue(ids, kind, goal, temperature, seed, True, ignore_eos)
        if self.template is None:
            return _Dialogue(self._first_token(), CONVERSATION_KIND, goal, temperature, seed, True)
        ids = list(self.template.before)
        return _Dialogue(ids, CONVERSATION_KIND, goal, temperature, seed, False, ignore_eos)

    def _of_document(self, rng: random.Random, text: str) -> tuple[list[int], str, bool]:
        """A part of the text to continue or to ask about; the question is fixed or the user's."""
        settings, template = self.settings, self.template
        room = settings.context - min(settings.answer_tokens, settings.context // 2)
        with_question = template is not None and rng.random() < 0.5
        if with_question:
            room -= settings.user_tokens
        length = rng.randint(min(32, max(room, 1)), max(room, 1))
        ids = self._encode(text)[:length]
        if template is None or not with_question:
            return ids, CONTINUATION_KIND, True
        ids = [*template.before, *ids, *self._encode("\n\n")]
        if rng.random() < 0.5:
            return ids, QUESTION_KIND, False
        question = self._encode(rng.choice(QUESTIONS))
        return [*ids, *question, *template.after], QUESTION_KIND, True

    def _as_chat(self, text: str) -> list[int]:
        max_tokens = max(self.settings.context - self.settings.answer_tokens, 1)
        ids = self._encode(text)[:max_tokens]
        if self.template is None:
            return ids
        return [*self.template.before, *ids, *self.template.after]

    def _first_token(self) -> list[int]:
        first = self.tokenizer.bos_token_id
        if first is None and not self.eos_ids:
            raise ConfigError(
                "the target has neither a chat template nor a token that begins a text; give "
                "--prompts or --documents."
            )
        return [self.eos_ids[0] if first is None else int(first)]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _user_turns(self, dialogues: list[_Dialogue]) -> None:
        template = self.template
        if not dialogues or template is None:
            return
        reserved = len(template.after) + 1  # the markup behind the turn, and a token of the answer
        dialogues = [d for d in dialogues if self._has_room(d, reserved + 1)]
        max_tokens = self.settings.user_tokens
        params = [self._params(d, USER_TEMPERATURE, max_tokens, reserved) for d in dialogues]
        for dialogue, ids in zip(dialogues, self._complete(dialogues, params), strict=True):
            turn = self._until_end(ids)
            dialogue.ids += turn
            dialogue.ids += template.after
            dialogue.is_answered_next = True
            dialogue.is_over = not turn

    def _answers(self, dialogues: list[_Dialogue]) -> None:
        dialogues = [d for d in dialogues if self._has_room(d, 1)]
        max_tokens = self.settings.answer_tokens
        params = [
            self._params(d, d.temperature, max_tokens, ends=not d.ignore_eos) for d in dialogues
        ]
        for dialogue, ids in zip(dialogues, self._complete(dialogues, params), strict=True):
            if dialogue.begin is None:
                dialogue.begin = len(dialogue.ids)
            dialogue.ids += ids
            self._begin_next_turn(dialogue)

    def _begin_next_turn(self, dialogue: _Dialogue) -> None:
        """Give the user the next turn, or end the conversation."""
        template = self.template
        dialogue.num_turns += 1
        between = template.between if template is not None else ()
        if (
            not between
            or dialogue.ignore_eos
            or len(dialogue.ids) >= dialogue.goal
            or dialogue.num_turns == MAX_TURNS
            or self._room(dialogue) <= len(between)
        ):
            dialogue.is_over = True
            return
        has_ended = dialogue.ids[-1] == between[0]
        dialogue.ids += between[1:] if has_ended else between
        dialogue.is_answered_next = False

    def _params(
        self,
        dialogue: _Dialogue,
        temperature: float,
        max_tokens: int,
        reserved: int = 0,
        ends: bool = True,
    ) -> SamplingParams:
        return SamplingParams(
            temperature=temperature,
            max_tokens=min(max_tokens, self._room(dialogue) - reserved),
            stop_token_ids=self.template.ends if self.template is not None and ends else (),
            ignore_eos=not ends,
            seed=dialogue.seed + len(dialogue.ids),
        )

    def _room(self, dialogue: _Dialogue) -> int:
        return self.settings.context - len(dialogue.ids)

    def _has_room(self, dialogue: _Dialogue, num_tokens: int) -> bool:
        dialogue.is_over = self._room(dialogue) < num_tokens
        return not dialogue.is_over

    def _complete(
        self, dialogues: list[_Dialogue], params: list[SamplingParams]
    ) -> list[list[int]]:
        if not dialogues:
            return []
        return self.completer.complete([dialogue.ids for dialogue in dialogues], params)

    def _until_end(self, ids: list[int]) -> list[int]:
        ends: Any = self.template.ends if self.template is not None else ()
        return ids[:-1] if ids and ids[-1] in ends else ids
