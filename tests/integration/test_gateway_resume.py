"""The request holder: engines that die in the middle of a stream, and come back or do not."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path

import pytest
from fake_engine import (
    EOS,
    FakeService,
    fake_facts,
    fake_service,
    only_link,
    scripted_token,
    tokenizer,
)
from waits import wait_until

from outrider.client import DeadlineError, UnavailableError
from outrider.kernels.seeds import sample_seed

pytestmark = pytest.mark.thorough

PROMPT = [10, 11, 12, 13]
SEED = 5


def expected(count: int, index: int = 0) -> list[int]:
    own = sample_seed(SEED, index)
    return [scripted_token(own, len(PROMPT) + position) for position in range(count)]


@pytest.mark.parametrize("loses_last_step", [False, True])
@pytest.mark.parametrize("deaths", [[1], [5], [29], [30], [4, 9], [6, 7, 8, 20]])
def test_no_token_is_told_twice_or_lost(
    tmp_path: Path, deaths: list[int], loses_last_step: bool
) -> None:
    with fake_service(tmp_path, deaths=list(deaths), loses_last_step=loses_last_step) as service:
        stream = service.client.stream(PROMPT, seed=SEED, max_tokens=30, logprobs=0)
        chunks = list(stream)
        assert [token for chunk in chunks for token in chunk.token_ids] == expected(30)
        assert "".join(chunk.text for chunk in chunks) == tokenizer().decode(expected(30))
        [sample] = stream.completion.samples
        assert len(sample.logprobs) == len(sample.origins) == 30
        if deaths[-1] < 25:
            assert stream.completion.resubmissions == len(deaths)


def test_a_resubmission_carries_the_same_spec_and_what_was_told_under_a_new_handle(
    tmp_path: Path,
) -> None:
    with fake_service(tmp_path, deaths=[6]) as service:
        service.client.generate(PROMPT, seed=SEED, max_tokens=20, request_id="mine")
        first, second = service.engine.submitted
        assert first.spec == second.spec
        [before], [after] = first.samples, second.samples
        assert before.output_ids == ()
        assert list(after.output_ids) == expected(6)
        assert before.handle != after.handle
        assert (first.is_resumed, second.is_resumed) == (False, True)


def test_a_finished_sample_is_not_submitted_again(tmp_path: Path) -> None:
    short = sample_seed(SEED, 0)

    def script(seed: int, position: int) -> int:
        return EOS if seed == short and position == 6 else scripted_token(seed, position)

    with fake_service(tmp_path, script=script, deaths=[24]) as service:
        done = service.client.generate(PROMPT, n=3, seed=SEED, max_tokens=20)
        assert [len(sample.token_ids) for sample in done.samples] == [3, 20, 20]
        assert [sample.token_ids for sample in done.samples[1:]] == [
            expected(20, index) for index in (1, 2)
        ]
        _, again = service.engine.submitted
        assert [sample.index for sample in again.samples] == [1, 2]


def test_text_held_back_for_a_stop_string_survives_the_loss(tmp_path: Path) -> None:
    script = tokenizer().encode("one two three four five six seven eight nine ten")
    with fake_service(
        tmp_path,
        script=lambda seed, position: script[(position - 4) % len(script)],
        deaths=[4],  # in the middle of the stop string
    ) as service:
        done = service.client.generate(PROMPT, max_tokens=60, stop=["three four five six"])
        assert done.text == "one two "
        assert done.samples[0].stop_reason == "three four five six"
        assert done.resubmissions == 1


def test_prompt_logprobs_are_told_once(tmp_path: Path) -> None:
    with fake_service(tmp_path, deaths=[6]) as service:
        done = service.client.generate(PROMPT, max_tokens=20, prompt_logprobs=1)
        assert len(done.prompt_logprobs) == len(PROMPT)
        assert service.engine.submitted[1].samples[0].prompt_logprobs_sent == len(PROMPT) - 1


def test_sixteen_streams_survive_the_same_losses(tmp_path: Path) -> None:
    with fake_service(tmp_path, deaths=[100, 333], is_paused=True) as service:
        streams = [service.client.stream(PROMPT, seed=SEED, n=2, max_tokens=30) for _ in range(16)]
        wait_until(lambda: len(service.engine.submitted) == 16)
        service.engine.is_paused = False
        for stream in streams:
            done = stream.result()
            assert [sample.token_ids for sample in done.samples] == [
                expected(30, index) for index in (0, 1)
            ]
        assert service.engine.lives == 3


# -- when it does not come back ---------------------------------------------------------------


def _lose_engine(service: FakeService) -> None:
    wait_until(lambda: service.engine.tokens_told > 4)
    service.engine.stop()


def test_an_engine_away_for_too_long_ends_the_stream(tmp_path: Path) -> None:
    options = {"resubmit_timeout_s": 0.2}
    with fake_service(tmp_path, server=options, step_s=0.01) as service:
        stream = service.client.stream(PROMPT, max_tokens=None)
        _lose_engine(service)
        with pytest.raises(UnavailableError, match=r"away for 0\.2 s"):
            list(stream)


def test_streams_wait_as_long_as_a_restart_of_the_engine_may_take(tmp_path: Path) -> None:
    facts = fake_facts(placement_timeout_s=0.1, start_timeout_s=0.3)
    with fake_service(tmp_path, facts=facts, step_s=0.01) as service:
        stream = service.client.stream(PROMPT, max_tokens=None)
        _lose_engine(service)
        with pytest.raises(UnavailableError, match=r"away for 0\.4 s"):
            list(stream)


def test_a_deadline_runs_on_while_the_engine_is_away(tmp_path: Path) -> None:
    with fake_service(tmp_path, step_s=0.01) as service:
        started_s = time.monotonic()
        stream = service.client.stream(PROMPT, max_tokens=None, timeout_s=0.5)
        _lose_engine(service)
        with pytest.raises(DeadlineError):
            list(stream)
        assert time.monotonic() - started_s < 30
        wait_until(lambda: service.client.status().active_requests == 0)


def test_a_client_may_leave_while_the_engine_is_away(tmp_path: Path) -> None:
    with fake_service(tmp_path, step_s=0.01) as service:
        stream = service.client.stream(PROMPT, max_tokens=None)
        _lose_engine(service)
        stream.cancel()
        wait_until(lambda: service.client.status().active_requests == 0)


def test_a_request_that_takes_engines_down_with_it_is_given_up(tmp_path: Path) -> None:
    with fake_service(tmp_path, is_paused=True, down_s=0.0) as service:
        service.engine.refuse = lambda submit: service.engine.die()
        with pytest.raises(UnavailableError, match="3 times in a row"):
            service.client.generate(PROMPT)
        assert len(service.engine.submitted) == 3


def test_a_request_that_gets_a_token_of_each_engine_before_it_ends_it_is_given_up(
    tmp_path: Path,
) -> None:
    with fake_service(tmp_path, deaths=list(range(1, 40)), down_s=0.0) as service:
        with pytest.raises(UnavailableError, match="8 times in a row, each time within 16 tokens"):
            service.client.generate(PROMPT, max_tokens=50, ignore_eos=True)
        assert len(service.engine.submitted) == 8


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 50000},
        {"settings": fake_facts(max_model_len=99).settings | {"target.revision": "other"}},
    ],
)
def test_another_model_cannot_go_on_with_a_text(tmp_path: Path, change: dict[str, object]) -> None:
    with fake_service(tmp_path, step_s=0.01) as service:
        stream = service.client.stream(PROMPT, max_tokens=None)
        _lose_engine(service)
        service.engine.facts = dataclasses.replace(service.engine.facts, **change)  # type: ignore[arg-type]
        service.engine.start()
        with pytest.raises(UnavailableError, match="another model"):
            list(itertools.islice(stream, 1000))


def test_seeds_of_a_seeded_engine_do_not_repeat_after_a_restart(tmp_path: Path) -> None:
    with fake_service(tmp_path, facts=fake_facts(seed=3)) as service:
        before = service.client.generate(PROMPT, max_tokens=2).seed
        lives = service.engine.lives
        service.engine.die()
        wait_until(lambda: service.engine.lives > lives)
        service.client.wait_ready(5)
        wait_until(lambda: only_link(service.server).number == 2)
        assert service.client.generate(PROMPT, max_tokens=2).seed != before
