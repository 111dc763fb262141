"""What servers tell of themselves, and what is made of it."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from outrider.api_types.results import ServerStatus
from outrider.loadtest.records import RequestSpeculation
from outrider.loadtest.runs import RunFolder, ServerSample, append
from outrider.loadtest.servers.counters import (
    PrometheusSample,
    put_metrics,
    put_status,
    read_prometheus,
    speculation_between,
)
from outrider.loadtest.servers.processes import use_of, use_of_tree
from outrider.loadtest.servers.server import ServerSpec, ServerUnderTest
from outrider.loadtest.servers.watch import ServerWatch, sample_of_processes
from outrider.proto import control_pb2

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.2e+03
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.76e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 50.0
"""
LLAMA = """\
llamacpp:tokens_predicted_total 900
llamacpp:n_decode_total 400
llamacpp:requests_processing 1
llamacpp:requests_deferred 3
"""
SGLANG = """\
sglang:generation_tokens_total{model_name="m"} 700.0
sglang:num_running_reqs{model_name="m"} 4.0
sglang:num_queue_reqs{model_name="m"} 0.0
sglang:spec_accept_length{model_name="m"} 2.5
sglang:spec_verify_calls_total{model_name="m"} 280.0
"""


def _sample(**given: object) -> ServerSample:
    return ServerSample(0.0, "s", None, **given)  # type: ignore[arg-type]


def test_prometheus_text_is_read_with_its_labels_and_without_what_is_none() -> None:
    text = '# c\n\nplain 3\nodd{a="x\\"}\\n",b="2"} 4.5 1700000000\nbroken{ 1\nword one\nn NaN\n'
    plain, odd = read_prometheus(text)
    assert plain == PrometheusSample("plain", {}, 3.0)
    assert odd == PrometheusSample("odd", {"a": 'x"}\n', "b": "2"}, 4.5)


def test_vllm_tells_rounds_drafts_and_positions() -> None:
    sample = _sample()
    put_metrics(sample, VLLM)
    assert (sample.running, sample.waiting, sample.committed) == (5, 2, 1200)
    assert (sample.rounds, sample.drafted, sample.accepted) == (100, 300, 150)
    assert sample.accepted_by_position == [80, 50, 20]


def test_our_metrics_tell_the_same_under_our_names() -> None:
    theirs, ours, both = _sample(), _sample(), _sample()
    page = VLLM.replace("vllm:", "outrider:").replace("model_name", "model")
    put_metrics(theirs, VLLM)
    put_metrics(ours, page)
    put_metrics(both, page + VLLM)
    assert ours == theirs == both
    put_metrics(ours, 'outrider:engine_steps_total{model="m"} 40.0\n')
    assert ours.steps == 40


def test_two_engines_of_one_vllm_add_up() -> None:
    sample = _sample()
    put_metrics(sample, VLLM + VLLM.replace('engine="0"', 'engine="1"'))
    assert (sample.running, sample.drafted) == (10, 600)
    assert sample.accepted_by_position == [160, 100, 40]


def test_llama_and_sglang_tell_what_they_have() -> None:
    llama, sglang = _sample(), _sample()
    put_metrics(llama, LLAMA)
    put_metrics(sglang, SGLANG)
    assert (llama.committed, llama.steps, llama.running, llama.waiting) == (900, 400, 1, 3)
    assert llama.drafted is None
    assert (sglang.committed, sglang.rounds, sglang.running, sglang.waiting) == (700, 280, 4, 0)
    assert sglang.accept_length == 2.5 and sglang.accepted is None


def test_a_page_that_is_something_else_tells_nothing() -> None:
    sample = _sample()
    put_metrics(sample, "<html>not found</html>\nvllm:num_requests_running NaN nothing")
    assert sample == _sample()


def test_our_status_tells_rounds_as_what_the_target_added_itself() -> None:
    engine = control_pb2.EngineState(
        running=2, waiting=1, steps=40, committed_tokens=90, drafted_tokens=80, accepted_tokens=30
    )
    sample = _sample()
    put_status(sample, ServerStatus.from_proto(control_pb2.GetStatusResponse(engine=engine)))
    assert (sample.running, sample.waiting, sample.steps) == (2, 1, 40)
    assert (sample.committed, sample.drafted, sample.accepted, sample.rounds) == (90, 80, 30, 60)
    put_status(other := _sample(), ServerStatus.from_proto(control_pb2.GetStatusResponse()))
    assert other == _sample()


def test_speculation_between_two_samples_is_what_was_counted_in_between() -> None:
    first = _sample(rounds=100, drafted=300, accepted=150, accepted_by_position=[80, 50, 20])
    last = _sample(rounds=110, drafted=330, accepted=167, accepted_by_position=[88, 56, 23])
    between = speculation_between(first, last)
    assert between == RequestSpeculation(10, 30, 17, rounds_by_accepted=[2, 2, 3, 3])
    assert sum(j * count for j, count in enumerate(between.rounds_by_accepted)) == 17


def test_no_speculation_is_told_of_a_server_that_counts_none_or_began_anew() -> None:
    counted = _sample(rounds=9, drafted=9, accepted=9)
    assert speculation_between(_sample(), counted) is None
    assert speculation_between(counted, _sample(rounds=1, drafted=1, accepted=1)) is None
    assert speculation_between(_sample(committed=5), _sample(committed=9)) is None


def test_rounds_that_are_not_told_follow_from_tokens() -> None:
    first = _sample(drafted=0, accepted=0, committed=0)
    last = _sample(drafted=40, accepted=10, committed=30)
    assert speculation_between(first, last) == RequestSpeculation(20, 40, 10, [])


def test_the_use_of_processes_is_that_of_all_of_them() -> None:
    own = use_of([os.getpid()])
    with open(os.devnull) as _:
        assert use_of([os.getpid()]).handles == own.handles + 1
    assert own.memory_mb > own.anonymous_mb > 1 and own.threads >= 1 and own.processes == 1
    tree = use_of_tree(os.getpid())
    assert tree is not None and tree.cpu_s >= own.cpu_s > 0
    assert use_of_tree(2**30) is None and use_of([2**30]).processes == 0


def test_a_sample_of_processes_can_be_kept_and_read_again(tmp_path: Path) -> None:
    sample = sample_of_processes("clients", [os.getpid()], at_s=1.5, arm="a")
    append(tmp_path / "samples.jsonl", sample)
    assert RunFolder(tmp_path).samples() == [sample]


def test_the_key_of_a_server_is_that_of_its_headers() -> None:
    keyed = ServerSpec("s", "grpc://here:1", headers={"Authorization": "Bearer the-key"})
    assert keyed.api_key == "the-key"
    other = ServerSpec("s", "grpc://here:1", headers={"Authorization": "Basic abc"})
    assert other.api_key is None and ServerSpec("s", "grpc://here:1").api_key is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:{}", "grpc://127.0.0.1:{}", "inprocess:"])
def test_a_server_that_is_not_there_gives_an_empty_sample(url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = ServerUnderTest(ServerSpec("s", url.format(port)), tmp_path)

    async def sample() -> ServerSample:
        watch = ServerWatch(server, clock=lambda: 7.0)
        try:
            return await watch.sample("a")
        finally:
            await watch.close()

    assert asyncio.run(sample()) == ServerSample(7.0, "s", "a")


def test_a_server_that_does_not_answer_costs_a_second_and_no_more(tmp_path: Path) -> None:
    async def watch() -> ServerSample:
        with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, never answers
            spec = ServerSpec("mute", f"http://127.0.0.1:{listener.getsockname()[1]}")
            watching = ServerWatch(ServerUnderTest(spec, tmp_path))
            try:
                async with asyncio.timeout(20):
                    return await watching.sample("a")
            finally:
                await watching.close()

    sample = asyncio.run(watch())
    assert (sample.running, sample.processes, sample.arm) == (None, 1, "a")
