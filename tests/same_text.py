"""Whether two texts are the same, or parted where rounding alone decides.

Deterministic engines are compared with `==`. Elsewhere sums are taken in another order for another
number of rows, so two tokens whose scores (noise included) are nearly equal may change places, and
from there on the texts have nothing in common. `assert_same_text` accepts exactly that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from checkpoints import reference_logits

from outrider import LLM, SamplingParams
from outrider.engine.outputs import CompletionOutput, RequestOutput
from outrider.kernels.reference import ReferenceOps
from outrider.workers.sampling.choose import sample
from outrider.workers.sampling.rows import RowSampler, Span

FLOAT32_MARGIN = 1e-3
MOST_NEAR_TIES = 0.01  # share of the sequences of one test that may need the margin

# The token chosen after a prefix, once the given logits have been moved by so much.
Choose = Callable[[Sequence[int], Mapping[int, float]], int]


@dataclass(frozen=True)
class Text:
    """A text and how any of its tokens is decided anew."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    choose: Choose


def recomputed_choice(
    llm: LLM, reference: Any, output: RequestOutput, params: SamplingParams, index: int = 0
) -> Choose:
    """Decides as sample `index` of `output` did, from the logits `reference` has on one prompt."""
    settled = replace(params, seed=output.outputs[index].seed)
    prepared = llm.engine.front_door.prepare("again", output.prompt_token_ids, settled)
    init = prepared.sample(index, 0.0).row_init()
    sampler = RowSampler.from_init(init, llm.engine.built.target.vocab_size, torch.device("cpu"))

    def choose(prefix: Sequence[int], nudges: Mapping[int, float]) -> int:
        logits = reference_logits(reference, prefix)[-1:].clone()
        for token, change in nudges.items():
            logits[0, token] += change
        return int(sample(logits, [Span(sampler, prefix)], ReferenceOps())[0])

    return choose


def texts_of(
    llm: LLM, reference: Any, outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]
) -> list[Text]:
    """Every sample of every output."""
    return [
        Text(
            output.prompt_token_ids,
            completion.token_ids,
            recomputed_choice(llm, reference, output, own, completion.index),
        )
        for output, own in zip(outputs, params, strict=True)
        for completion in output.outputs
    ]


def assert_same_text(a: Text, b: Text, margin: float) -> bool:
    """Pass if the texts are equal (returns True) or part at a near tie (returns False).

    A near tie: moving the logits of the two tokens by half the margin each, one up and one down,
    makes either of them the choice on the common prefix. That covers the edges of top_k, top_p and
    min_p as well as the noise.
    """
    assert list(a.prompt_ids) == list(b.prompt_ids), "the prompts differ"
    if list(a.token_ids) == list(b.token_ids):
        return True
    common = 0
    for one, other in zip(a.token_ids, b.token_ids, strict=False):
        if one != other:
            break
        common += 1
    shorter = min(len(a.token_ids), len(b.token_ids))
    assert common < shorter, f"one text ends after {shorter} tokens where the other goes on"
    prefix = [*a.prompt_ids, *a.token_ids[:common]]
    tokens = (a.token_ids[common], b.token_ids[common])
    for wanted, other in (tokens, tokens[::-1]):
        nudged = a.choose(prefix, {wanted: margin / 2, other: -margin / 2})
        assert nudged == wanted, (
            f"output token {common} is {tokens[0]} in one text and {tokens[1]} in the other; "
            f"a margin of {margin} would choose {nudged} rather than {wanted}"
        )
    return False


def assert_same_texts(pairs: Iterable[tuple[Text, Text]], margin: float = FLOAT32_MARGIN) -> None:
    """`assert_same_text` for each pair; near ties must be rare."""
    same = [assert_same_text(a, b, margin) for a, b in pairs]
    assert same, "nothing was compared"
    near_ties = same.count(False)
    assert near_ties <= max(1, MOST_NEAR_TIES * len(same)), f"{near_ties} near ties in {len(same)}"


def content(output: CompletionOutput) -> tuple[Any, ...]:
    """All of a completion that a reader sees and that speculation must not change."""
    return (
        output.token_ids,
        output.text,
        output.finish_reason,
        output.stop_reason,
        output.logprobs,
        output.cumulative_logprob,
    )


def contents(outputs: Iterable[RequestOutput]) -> list[tuple[Any, ...]]:
    """`content` of every sample, with the prompt's log-probabilities."""
    return [
        (*content(completion), output.prompt_logprobs)
        for output in outputs
        for completion in output.outputs
    ]


def acceptance_rate(outputs: Iterable[RequestOutput]) -> float:
    """Accepted over drafted tokens of all samples; 0 if nothing was drafted."""
    records = [c.speculation for output in outputs for c in output.outputs]
    drafted = sum(record.drafted for record in records)
    return sum(record.accepted for record in records) / drafted if drafted else 0.0
