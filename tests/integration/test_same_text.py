"""Speculation changes no text: any proposer, depth, sampling parameter, batch and disturbance.

The expected texts come from an engine without a draft that decodes plainly. Deterministic engines
must repeat them bit for bit, log-probabilities included; others up to near ties.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import random_prompt
from same_text import (
    CASES,
    METHODS,
    NUM_TOKENS,
    PLAIN,
    PROMPTS,
    TEMPERATURES,
    Asked,
    Text,
    acceptance_rate,
    all_temperatures,
    assert_same_text,
    assert_same_texts,
    by_every_method,
    case_requests,
    content,
    contents,
    repeated_for_every_method,
    run,
    texts_of,
)

from outrider import LLM, SamplingParams
from outrider.text.outputs import RequestOutput
from outrider.workers import target

pytestmark = pytest.mark.model

EngineFactory = Callable[..., LLM]

BLOCK_SIZE = 8
# Plain torch is several times slower: one set of parameters by default.
A_FEW_CASES = [
    pytest.param(name, marks=() if name == "all" else (pytest.mark.slow,)) for name in CASES
]


# -- the comparison itself -----------------------------------------------------------------------


def scored(scores: Mapping[int, float], token_ids: list[int]) -> Text:
    """A text whose every token is chosen by the same scores."""

    def choose(prefix: Sequence[int], nudges: Mapping[int, float]) -> int:
        return max(scores, key=lambda token: scores[token] + nudges.get(token, 0.0))

    return Text([1], token_ids, choose)


@pytest.mark.parametrize(
    ("scores", "same"),
    (({5: 1.0, 6: 0.9995}, True), ({5: 1.0, 6: 0.998}, False), ({5: 1.0, 6: 1.0, 7: 2.0}, False)),
    ids=("near tie", "clear winner", "both lose"),
)
def test_texts_may_part_where_the_margin_decides_and_nowhere_else(
    scores: Mapping[int, float], same: bool
) -> None:
    a, b = scored(scores, [5, 5]), scored(scores, [5, 6])
    if same:
        assert not assert_same_text(a, b, margin=1e-3)
    else:
        with pytest.raises(AssertionError, match="output token 1 is 5 in one text and 6"):
            assert_same_text(a, b, margin=1e-3)


def test_a_text_that_ends_early_is_not_the_same() -> None:
    a, b = scored({5: 1.0}, [5, 5]), scored({5: 1.0}, [5])
    with pytest.raises(AssertionError, match="ends after 1"):
        assert_same_text(a, b, margin=1e-3)


def test_near_ties_must_be_rare() -> None:
    pair = scored({5: 1.0, 6: 1.0}, [5]), scored({5: 1.0, 6: 1.0}, [6])
    with pytest.raises(AssertionError, match="2 near ties"):
        assert_same_texts([pair, pair])


# -- engines -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def plain(engine: EngineFactory) -> LLM:
    """No draft model, nothing cached, one request at a time."""
    return engine(draft_model=None, max_num_seqs=1, enable_prefix_caching=False)


@pytest.fixture
def all_threads(one_thread: None) -> None:
    torch.set_num_threads(2)


# -- each parameter, every method ---------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_shows_in_the_text(name: str, plain: LLM) -> None:
    case = CASES[name]
    without = replace(case, params={})
    assert contents(run(plain, case_requests(case))) != contents(run(plain, case_requests(without)))


@pytest.mark.parametrize("name", CASES)
def test_every_method_in_one_batch_writes_the_plain_text(
    name: str, plain: LLM, engine: EngineFactory
) -> None:
    requests = case_requests(CASES[name])
    outputs = run(engine(), by_every_method(requests))
    n = requests[0][1].n
    assert contents(outputs) == repeated_for_every_method(contents(run(plain, requests)), n)


@pytest.mark.parametrize("name", A_FEW_CASES)
def test_plain_torch_kernels_write_their_plain_text_too(name: str, engine: EngineFactory) -> None:
    requests = case_requests(CASES[name])[::4]
    alone = engine(draft_model=None, cpu_kernels="torch", max_num_seqs=1)
    outputs = run(engine(cpu_kernels="torch"), by_every_method(requests))
    n = requests[0][1].n
    assert contents(outputs) == repeated_for_every_method(contents(run(alone, requests)), n)


@pytest.mark.parametrize("name", A_FEW_CASES)
def test_without_deterministic_mode_texts_part_at_near_ties_only(
    name: str, pair: Any, engine: EngineFactory
) -> None:
    options = {"deterministic": False, "cpu_kernels": "torch"}
    requests = case_requests(CASES[name])[::2]
    every = by_every_method(requests)
    llm = engine(**options)
    alone = run(engine(draft_model=None, max_num_seqs=1, **options), requests)
    expected = [output for output in alone for _ in METHODS]
    params = [params for _, params in every]
    assert_same_texts(
        zip(
            texts_of(llm, pair.reference, run(llm, every), params),
            texts_of(llm, pair.reference, expected, params),
            strict=True,
        )
    )


@pytest.mark.parametrize("depth", (1, 3, 5, 8))
def test_the_draft_is_neither_always_right_nor_always_wrong(
    depth: int, engine: EngineFactory
) -> None:
    method = {"speculation": "draft", "num_speculative_tokens": depth}
    outputs = run(engine(), all_temperatures(max_tokens=NUM_TOKENS, **method))
    assert 0.2 < acceptance_rate(outputs) < 0.95


@pytest.mark.parametrize("lag", (0, 1))
def test_a_draft_equal_to_the_target_is_always_right(
    lag: int, pair: Any, engine: EngineFactory
) -> None:
    """A wrong token would betray draft KV that is missing, stale or of another position."""
    llm = engine(
        draft_model=str(pair.target),
        draft_dtype="float32",  # or it would be rounded to 8 bits
        lag=lag,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=40,
        max_num_seqs=12,
    )
    requests = [
        (prompt, replace(params, **METHODS[f"draft at depth {depth}"]))
        for prompt, params in all_temperatures(max_tokens=NUM_TOKENS, ignore_eos=True, top_k=50)
        for depth in (1, 3, 8)
    ]
    for _ in ("computed", "cached"):
        assert acceptance_rate(run(llm, requests)) == 1.0


def test_looked_up_tokens_are_accepted_and_change_nothing(
    plain: LLM, engine: EngineFactory
) -> None:
    requests = all_temperatures(max_tokens=60, allowed_token_ids=[10, 11, 12])
    looked_up = [(prompt, replace(params, **METHODS["ngram"])) for prompt, params in requests]
    outputs = run(engine(), looked_up)
    assert 0.2 < acceptance_rate(outputs) < 0.95
    assert contents(outputs) == contents(run(plain, requests))


def test_the_speculation_record_adds_up(engine: EngineFactory) -> None:
    for output in run(engine(), by_every_method(all_temperatures(max_tokens=NUM_TOKENS))):
        record = output.outputs[0].speculation
        assert len(record.drafted_by_token) == len(output.outputs[0].token_ids)
        assert record.accepted == sum(record.drafted_by_token) <= record.drafted


def test_threads_change_nothing(plain: LLM, engine: EngineFactory, all_threads: None) -> None:
    requests = all_temperatures(max_tokens=NUM_TOKENS)
    with_threads = contents(run(engine(), by_every_method(requests)))
    torch.set_num_threads(1)
    assert with_threads == repeated_for_every_method(contents(run(plain, requests)))


def test_seeds_decide_the_text(plain: LLM) -> None:
    def text(seed: int) -> str:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=NUM_TOKENS)
        return run(plain, [(PROMPTS[1], params)])[0].outputs[0].text

    assert text(5) == text(5) != text(6)


def test_a_request_without_a_seed_is_repeated_by_the_one_it_reports(engine: EngineFactory) -> None:
    params = SamplingParams(temperature=1.0, n=2, max_tokens=NUM_TOKENS)
    first = run(engine(), [(PROMPTS[1], params)])
    again = run(engine(), [(PROMPTS[1], replace(params, seed=first[0].outputs[0].seed))])
    assert contents(first) == contents(again)
    assert first[0].outputs[0].token_ids != first[0].outputs[1].token_ids


# -- disturbances -------------------------------------------------------------------------------

SCENES: Mapping[str, Mapping[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 21, "max_num_seqs": 16},
    "one step behind": {"lag": 1},
    "chunked, one step behind": {"max_num_batched_tokens": 33, "max_num_seqs": 8, "lag": 1},
    "nothing cached": {"enable_prefix_caching": False},
}


def mixed_requests(count: int) -> list[Asked]:
    """Prompts of 1 to 90 tokens, some beginning alike, with all methods and temperatures."""
    choices = random.Random(4)
    shared = random_prompt(60, seed=9)
    methods = list(METHODS.values())
    requests = []
    for index in range(count):
        own = random_prompt(choices.randint(1, 30), seed=index)
        prompt = shared[: choices.choice((0, 0, 17, 60))] + own
        params = SamplingParams(
            temperature=TEMPERATURES[index % 3],
            seed=index,
            max_tokens=choices.randint(10, 40),
            presence_penalty=choices.choice((0.0, 1.0)),
            logprobs=choices.choice((None, 1)),
            **methods[index % len(methods)],
        )
        requests.append((prompt, params))
    return requests


REQUESTS = mixed_requests(18)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[tuple[Any, ...]]:
    return contents(run(plain, [(prompt, replace(p, **PLAIN)) for prompt, p in REQUESTS]))


@pytest.mark.parametrize("scene", SCENES)
def test_the_way_of_batching_changes_nothing(
    scene: str, engine: EngineFactory, expected: list[Any]
) -> None:
    assert contents(run(engine(block_size=BLOCK_SIZE, **SCENES[scene]), REQUESTS)) == expected


@pytest.mark.parametrize("lag", (0, 1))
def test_cached_prefixes_of_target_and_draft_change_nothing(
    lag: int, engine: EngineFactory, expected: list[Any]
) -> None:
    llm = engine(block_size=BLOCK_SIZE, lag=lag, max_num_seqs=7)
    run(llm, REQUESTS[::-1])
    outputs = run(llm, REQUESTS)
    assert sum(output.metrics.num_cached_tokens for output in outputs) > 300
    assert contents(outputs) == expected


@pytest.fixture
def tight(pair: Any, engine: EngineFactory, kv_gb: Callable[..., float]) -> Callable[[int], LLM]:
    """Engines with KV for little more than the longest request."""
    longest = max(len(prompt) + (params.max_tokens or 0) for prompt, params in REQUESTS)
    room = kv_gb(longest + 3 * BLOCK_SIZE, pair.target, pair.draft, block_size=BLOCK_SIZE)

    def get(lag: int) -> LLM:
        return engine(
            block_size=BLOCK_SIZE,
            lag=lag,
            max_model_len=longest,
            kv_cache_gb=room,
            max_num_seqs=8,
            max_num_batched_tokens=64,
        )

    return get


@pytest.mark.parametrize("lag", (0, 1))
def test_preemption_changes_nothing(
    lag: int, tight: Callable[[int], LLM], expected: list[Any]
) -> None:
    llm = tight(lag)
    scheduler = llm.engine.built.loop.scheduler
    before = scheduler.num_preemptions
    outputs = run(llm, REQUESTS)
    assert scheduler.num_preemptions > before
    assert 0.2 < acceptance_rate(outputs) < 0.95
    assert contents(outputs) == expected
    scheduler.check_integrity()
    assert scheduler.target_pool.num_free == scheduler.target_pool.num_blocks


def storm(llm: LLM, seed: int) -> Iterator[tuple[int, RequestOutput]]:
    """Add the requests at random moments and cancel some at random moments."""
    chance = random.Random(seed)
    engine = llm.engine
    waiting = list(range(len(REQUESTS)))
    chance.shuffle(waiting)
    running: dict[int, RequestOutput] = {}
    while waiting or engine.has_work:
        if waiting and chance.random() < 0.4:
            index = waiting.pop()
            running[index] = engine.add(f"storm-{seed}-{index}", *REQUESTS[index])
        unfinished = [index for index, output in running.items() if not output.finished]
        if unfinished and chance.random() < 0.08:
            engine.cancel(f"storm-{seed}-{chance.choice(unfinished)}")
        engine.step()
        engine.built.loop.scheduler.check_integrity()
    yield from running.items()


STORMS = [pytest.param(seed, marks=() if seed == 0 else (pytest.mark.slow,)) for seed in range(30)]


@pytest.mark.parametrize("lag", (0, 1))
@pytest.mark.parametrize("seed", STORMS)
def test_neighbours_that_come_and_go_change_nothing(
    seed: int, lag: int, tight: Callable[[int], LLM], expected: list[Any]
) -> None:
    reasons = set()
    for index, output in storm(tight(lag), seed):
        found, wanted = output.outputs[0], expected[index]
        reasons.add(found.finish_reason)
        if found.finish_reason == "cancelled":
            assert found.token_ids == wanted[0][: len(found.token_ids)]
        else:
            assert content(found) == wanted[:-1]
    assert reasons >= {"cancelled", "length"}


# -- rejection sampling -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rejecting(engine: EngineFactory) -> LLM:
    return engine(verification="rejection")


def test_rejection_sampling_at_temperature_0_writes_the_plain_text(
    plain: LLM, rejecting: LLM
) -> None:
    requests = [
        (prompt, params)
        for name in ("repetition_penalty", "all")
        for prompt, params in case_requests(CASES[name], n=1)
        if params.temperature == 0
    ]
    outputs = run(rejecting, by_every_method(requests))
    assert contents(outputs) == repeated_for_every_method(contents(run(plain, requests)))


def test_rejection_sampling_repeats_itself_by_seed(rejecting: LLM) -> None:
    requests = by_every_method(case_requests(CASES["all"], n=1))
    again = run(rejecting, requests[::-1])[::-1]
    assert contents(run(rejecting, requests)) == contents(again)


def test_rejection_sampling_at_depth_0_writes_the_plain_text(plain: LLM, rejecting: LLM) -> None:
    requests = case_requests(CASES["top_p"])
    undrafted = [(prompt, replace(params, num_speculative_tokens=0)) for prompt, params in requests]
    assert contents(run(rejecting, undrafted)) == contents(run(plain, requests))


def test_rejection_sampling_accepts_and_rejects(plain: LLM, rejecting: LLM) -> None:
    requests = case_requests(CASES["top_p"])
    outputs = run(rejecting, requests)
    assert 0.2 < acceptance_rate(outputs) < 0.95
    assert contents(outputs) != contents(run(plain, requests))


@pytest.mark.parametrize("policy", ["goodput", "threshold", "trim", "off"])
def test_whoever_decides_on_depths_the_text_is_the_plain_one(
    engine: EngineFactory, policy: str
) -> None:
    llm = engine(speculation_policy=policy, num_speculative_tokens=4)
    sampled = SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    drafted = [([number], params) for number in range(5, 11) for params in (sampled, greedy)]
    plain = [(prompt, replace(params, speculation="off")) for prompt, params in drafted]
    assert contents(run(llm, drafted)) == contents(run(llm, plain))


# -- the bundled pair ---------------------------------------------------------------------------


def test_the_bundled_pair_writes_the_plain_text() -> None:
    llm = LLM(
        draft_model="smollm2-135m-draft",
        deterministic=True,
        kv_cache_gb=0.2,
        speculation_policy="fixed",
    )
    sampled: Mapping[str, Any] = {"temperature": 0.7, "seed": 3, "logprobs": 1}
    prompts = ["The sun rises in the", "def add(a, b):\n    return a"]
    requests = [
        (llm.get_tokenizer()(prompt).input_ids, SamplingParams(**method, **params))
        for method in (PLAIN, METHODS["draft at depth 3"], METHODS["ngram"])
        for params in ({"temperature": 0.0}, sampled)
        for prompt in prompts
    ]
    outputs = run(llm, requests)
    found = contents(outputs)
    assert 0 < acceptance_rate(outputs[4:8]) < 1
    assert found[4:8] == found[8:] == found[:4]


@pytest.mark.parametrize("verification", ["shared", "rejection"])
def test_rows_looked_at_a_few_at_a_time_give_the_same_texts(
    engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, verification: str
) -> None:
    """Log-probabilities of prompts and outputs included."""
    llm = engine(verification=verification)
    requests = all_temperatures(logprobs=2, prompt_logprobs=2)
    expected = contents(run(llm, requests))
    monkeypatch.setattr(target, "LOGIT_ROWS", 3)
    assert contents(run(llm, requests)) == expected
