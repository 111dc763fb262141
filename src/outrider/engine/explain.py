"""Steps as they were decided and as they went, put into words and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.links.speculation import CandidateAccount, StepAccount
from outrider.scheduler.control import StepRecord
from outrider.scheduler.depths import Candidate
from outrider.scheduler.policies import OFF

NUM_PARTS = 4  # of the remembered steps, to show how calibration went


def account_of(record: StepRecord) -> StepAccount:
    choice = record.choice
    return StepAccount(
        step=step_number(record),
        policy=record.policy,
        num_rows=record.num_rows,
        num_waiting=record.num_waiting,
        num_prompt_tokens=record.num_prompt_tokens,
        num_drafting=sum(depth > 0 for depth in choice.depths),
        num_drafts=record.num_drafts,
        num_caught_up=record.num_caught_up,
        candidates=tuple(CandidateAccount(*each) for each in dict.fromkeys(choice.candidates)),
        chosen=None if choice.chosen is None else CandidateAccount(*choice.chosen),
        reason=_reason(record),
        committed=record.committed,
        draft_s=record.draft_s,
        verify_s=record.verify_s,
    )


def step_number(record: StepRecord) -> int:
    """As plans and verdicts have it, from 1."""
    return record.step + 1


def calibration(records: Iterable[StepRecord], num_parts: int) -> tuple[float, ...]:
    """How far predicted tokens per second were off, as a share, over some parts of the steps in
    order. Single steps are off by luck: what counts is whether many of them add up."""
    pairs = [pair for each in records if (pair := _predicted_and_done(each)) is not None]
    size = -(-len(pairs) // num_parts)
    parts = (pairs[start : start + size] for start in range(0, len(pairs), size or 1))
    return tuple(map(_error, parts))


def _predicted_and_done(record: StepRecord) -> tuple[Candidate, StepRecord] | None:
    """None where nothing was predicted, or something else was done in the end."""
    chosen = record.choice.chosen
    if chosen is None or chosen.num_drafts != record.num_drafts or not chosen.seconds:
        return None
    if not record.committed or record.draft_s + record.verify_s <= 0:
        return None
    return chosen, record


def _error(pairs: Sequence[tuple[Candidate, StepRecord]]) -> float:
    predicted = sum(each.tokens for each, _ in pairs) / sum(each.seconds for each, _ in pairs)
    committed = sum(each.committed or 0 for _, each in pairs)
    spent_s = sum(each.draft_s + each.verify_s for _, each in pairs)
    return abs(predicted * spent_s / committed - 1)


def _reason(record: StepRecord) -> str:
    choice = record.choice
    if not record.num_rows:
        return "Only prompts were computed."
    wanted = sum(choice.depths)
    if not wanted:
        return _plain_reason(record)
    drafting = sum(depth > 0 for depth in choice.depths)
    text = (
        f"{_count(wanted, 'draft')} for {drafting} of {_count(record.num_rows, 'row')}, "
        f"at most {max(choice.depths)} each"
    )
    if choice.num_selected is not None:
        text += f", of which the {choice.num_selected} likeliest are verified"
    ratio = _ratio(choice.chosen, choice.candidates)
    if ratio is not None:
        text += f": it promised {ratio:.2f} times the rate of plain decoding"
    elif record.policy:
        text += f", as the policy {record.policy} says"
    if record.num_drafts < wanted:
        text += (
            f"; {record.num_drafts} were planned in the end, as the draft had to catch up or "
            "memory was short"
        )
    return f"{text}."


def _plain_reason(record: StepRecord) -> str:
    choice = record.choice
    if record.policy == OFF:
        return "Plain decoding, as the policy off says."
    best = max(choice.candidates[1:], key=lambda each: each.tokens_per_s, default=None)
    ratio = _ratio(best, choice.candidates)
    if best is None or ratio is None:
        return "Plain decoding: no row was to be drafted for."
    found = f"the best drafting found ({_count(best.num_drafts, 'draft')}) promised"
    if ratio < 1:
        return f"Plain decoding: {found} {ratio:.2f} times its rate."
    return f"Plain decoding: {found} {ratio:.2f} times its rate, too little to change for."


def _ratio(candidate: Candidate | None, candidates: Sequence[Candidate]) -> float | None:
    """Its rate over that of plain decoding."""
    if candidate is None or not candidates or not candidates[0].tokens_per_s:
        return None
    return candidate.tokens_per_s / candidates[0].tokens_per_s


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
