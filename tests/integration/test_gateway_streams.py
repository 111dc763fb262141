"""Streams of a real server over an engine whose model is a script: what arrives, and in what
order."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_engine import EOS, FakeService, fake_service, scripted_token, tokenizer
from waits import wait_until

from outrider.client import Client, DeadlineError, RequestCancelledError
from outrider.kernels.seeds import sample_seed
from outrider.scheduler.params import SamplingParams
from outrider.text.tokenizer import of_transformers

PROMPT = [10, 11, 12, 13]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeService]:
    with fake_service(tmp_path_factory.mktemp("gw")) as running:
        yield running


@pytest.fixture
def client(service: FakeService) -> Client:
    return service.client


def expected(seed: int, count: int, index: int = 0, prompt_len: int = len(PROMPT)) -> list[int]:
    own = sample_seed(seed, index)
    return [scripted_token(own, prompt_len + position) for position in range(count)]


def words(*texts: str) -> list[int]:
    return [token for text in texts for token in tokenizer().encode(text)]


# -- content ----------------------------------------------------------------------------------


def test_the_stream_adds_up_to_the_tokens_of_the_seed_and_their_text(client: Client) -> None:
    stream = client.stream(PROMPT, seed=7, max_tokens=40, ignore_eos=True)
    chunks = list(stream)
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == stream.completion.samples[0].token_ids == expected(7, 40)
    assert "".join(chunk.text for chunk in chunks) == tokenizer().decode(tokens)
    assert len(chunks) > 10


def test_only_the_last_chunk_has_a_finish_reason(client: Client) -> None:
    chunks = list(client.stream(PROMPT, max_tokens=12))
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_every_token_says_whose_it_is(client: Client) -> None:
    stream = client.stream(PROMPT, max_tokens=12)
    for chunk in stream:  # of one round or several, each of which ends with the target's token
        assert len(chunk.origins) == len(chunk.token_ids)
        assert set(chunk.origins) <= {"draft", "target"} and chunk.origins[-1] == "target"
    assert stream.completion.samples[0].origins.count("draft") == 4


def test_tokens_of_ngram_lookup_are_called_so(client: Client) -> None:
    done = client.generate(PROMPT, max_tokens=12, speculation="ngram")
    assert set(done.samples[0].origins) == {"ngram", "target"}


def test_without_speculation_every_token_is_the_targets(client: Client) -> None:
    done = client.generate(PROMPT, max_tokens=12, speculation="off")
    assert set(done.samples[0].origins) == {"target"}
    assert done.speculation.block_efficiency == 1.0


def test_usage_and_statistics_count_what_happened(client: Client) -> None:
    done = client.generate(PROMPT, max_tokens=12)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (4, 12)
    assert done.usage.cached_tokens == 1
    record = done.speculation
    assert (record.rounds, record.accepted_tokens) == (8, 4)
    assert record.block_efficiency == 12 / 8
    assert 0 < done.timings.time_to_first_token_s <= done.timings.total_s


def test_a_drawn_seed_is_reported_and_gives_the_same_text_again(client: Client) -> None:
    first = client.generate(PROMPT, max_tokens=8)
    again = client.generate(PROMPT, max_tokens=8, seed=first.seed)
    assert again.samples[0].token_ids == first.samples[0].token_ids
    assert client.generate(PROMPT, max_tokens=8).seed != first.seed


def test_a_text_and_a_conversation_are_tokenised_by_the_server(service: FakeService) -> None:
    service.client.generate("Hello world", max_tokens=1)
    assert list(service.engine.submitted[-1].spec.prompt_ids) == words("Hello world")
    messages = [{"role": "user", "content": "Hello"}]
    service.client.chat(messages, max_tokens=1)
    templated = of_transformers(tokenizer()).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )
    assert list(service.engine.submitted[-1].spec.prompt_ids) == templated["input_ids"]


def test_parameters_reach_the_engine_as_they_were_given(service: FakeService) -> None:
    params = SamplingParams(
        n=1,
        temperature=0.3,
        top_k=5,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        repetition_penalty=1.1,
        logit_bias={5: -3.5},
        allowed_token_ids=[5, 6, 7],
        bad_words=["never"],
        min_tokens=2,
        max_tokens=None,
        stop=["halt"],
        stop_token_ids=[9],
        include_stop_str_in_output=True,
        ignore_eos=True,
        seed=2**64 - 1,
        logprobs=2,
        prompt_logprobs=1,
        echo=True,
        skip_special_tokens=False,
        speculation="ngram",
        num_speculative_tokens=2,
        fix_depth=True,
    )
    service.client.generate([1] * 500, params, priority=-3)
    spec = service.engine.submitted[-1].spec
    assert spec.params == params
    assert (spec.priority, spec.depth, spec.max_len) == (-3, 2, 512)
    assert spec.is_depth_fixed


def test_logprobs_come_with_their_tokens_and_those_of_the_prompt_once(client: Client) -> None:
    done = client.generate(PROMPT, max_tokens=9, logprobs=2, prompt_logprobs=2, seed=3)
    [sample] = done.samples
    assert len(sample.logprobs) == 9
    for token, found in zip(sample.token_ids, sample.logprobs, strict=True):
        assert found is not None and list(found) == [token + 1, token + 2, token]
        assert (found[token].rank, found[token].logprob) == (3, -1.5)
    assert sample.cumulative_logprob == 9 * -1.5
    assert done.prompt_logprobs[0] is None
    assert [list(found or ())[-1] for found in done.prompt_logprobs[1:]] == PROMPT[1:]


def test_echo_puts_the_prompt_before_the_text(client: Client) -> None:
    plain = client.generate("Hello world", max_tokens=6, seed=1)
    echoed = client.generate("Hello world", max_tokens=6, seed=1, echo=True)
    assert echoed.text == "Hello world" + plain.text


def test_text_spans_cover_the_text_and_follow_the_origins(client: Client) -> None:
    for chunk in client.stream(PROMPT, max_tokens=40, seed=11, want_text_spans=True):
        assert sum(size for size, _ in chunk.spans) == len(chunk.text)
        assert {origin for _, origin in chunk.spans} <= {"draft", "target"}


# -- several samples --------------------------------------------------------------------------


def test_samples_have_seeds_of_their_own_and_share_the_prompt(service: FakeService) -> None:
    done = service.client.generate(PROMPT, n=3, seed=5, max_tokens=10)
    for index, sample in enumerate(done.samples):
        assert (sample.index, sample.finish_reason) == (index, "length")
        assert sample.token_ids == expected(5, 10, index)
    assert done.usage.completion_tokens == 30
    submit = service.engine.submitted[-1]
    assert submit.spec.prompt_ids == tuple(PROMPT)
    assert [sample.index for sample in submit.samples] == [0, 1, 2]


def test_the_summary_comes_when_the_last_sample_has_ended(service: FakeService) -> None:
    short = sample_seed(5, 0)
    service.engine.script = lambda seed, position: (
        EOS if seed == short and position == 8 else 2000 + position
    )
    try:
        stream = service.client.stream(PROMPT, n=2, seed=5, max_tokens=30)
        for chunk in stream:
            ended = [sample for sample in stream.completion.samples if sample.finish_reason]
            is_done = len(ended) == 2  # one may have ended before the other has begun
            assert (stream.completion.usage.completion_tokens > 0) == is_done
            assert not (chunk.index == 0 and len(chunk.token_ids) == 0)
        assert [len(sample.token_ids) for sample in stream.completion.samples] == [5, 30]
    finally:
        service.engine.script = scripted_token


# -- ends -------------------------------------------------------------------------------------


def test_a_stop_string_across_chunks_ends_the_text_and_cancels_the_sample(
    service: FakeService,
) -> None:
    script = words("The quick brown fox jumps over the lazy dog and runs away")
    service.engine.script = lambda seed, position: script[(position - 4) % len(script)]
    try:
        before = len(service.engine.cancelled)
        stream = service.client.stream(PROMPT, max_tokens=400, stop=["fox jumps o"])
        texts = [chunk.text for chunk in stream]
        done = stream.completion
        assert done.text == "".join(texts) == "The quick brown "
        assert (done.samples[0].finish_reason, done.samples[0].stop_reason) == (
            "stop",
            "fox jumps o",
        )
        wait_until(lambda: len(service.engine.cancelled) == before + 1)
    finally:
        service.engine.script = scripted_token


def test_the_models_end_of_text_ends_a_sample_and_is_named(service: FakeService) -> None:
    service.engine.script = lambda seed, position: EOS if position == 9 else 2000 + position
    try:
        [sample] = service.client.generate(PROMPT, max_tokens=50).samples
        assert (sample.finish_reason, sample.stop_reason) == ("stop", EOS)
        assert sample.token_ids[-1] == EOS and len(sample.token_ids) == 6
    finally:
        service.engine.script = scripted_token


def test_a_deadline_reaches_the_engine_and_ends_the_stream(service: FakeService) -> None:
    service.engine.is_paused = True
    try:
        with pytest.raises(DeadlineError, match="deadline"):
            service.client.generate(PROMPT, timeout_s=0.5)
        timeout_s = service.engine.submitted[-1].timeout_s
        assert timeout_s is not None and 0 < timeout_s < 0.6  # gRPC rounds up on the wire
        wait_until(lambda: not service.engine.running)
    finally:
        service.engine.is_paused = False


def test_cancelling_a_stream_reaches_the_engine(service: FakeService) -> None:
    service.engine.step_s = 0.02
    try:
        stream = service.client.stream(PROMPT, max_tokens=None, n=2)
        next(stream)
        handles = {sample.handle for sample in service.engine.submitted[-1].samples}
        stream.cancel()
        wait_until(lambda: handles <= set(service.engine.cancelled))
        with pytest.raises(RequestCancelledError):
            list(stream)
    finally:
        service.engine.step_s = 0.001


def test_a_client_that_goes_away_cancels_its_requests(service: FakeService) -> None:
    service.engine.step_s = 0.02
    try:
        with Client(service.server.grpc_address) as other:
            next(other.stream(PROMPT, max_tokens=None))
            [sample] = service.engine.submitted[-1].samples
        wait_until(lambda: sample.handle in service.engine.cancelled)
        assert service.client.status().active_requests == 0
    finally:
        service.engine.step_s = 0.001


# -- many -------------------------------------------------------------------------------------


def test_sixteen_clients_at_once_get_their_own_texts(service: FakeService) -> None:
    def ask(seed: int) -> list[int]:
        with Client(service.server.grpc_address) as own:
            return (
                own.generate(PROMPT, seed=seed, max_tokens=60, ignore_eos=True).samples[0].token_ids
            )

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    assert answers == [expected(seed, 60) for seed in range(16)]
