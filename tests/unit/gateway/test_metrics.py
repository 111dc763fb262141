"""Counts of several gateway processes as one page, and what bounds the number of series."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from metrics_tools import Page

from outrider.api_types.errors import DeadlineError, RateLimitError, UnknownModelError
from outrider.errors import CapacityError, ConfigError, OutriderError, RequestError
from outrider.gateway.metrics.names import BY_NAME, METRICS, MetricKind, MetricSource
from outrider.gateway.metrics.page import (
    FOLDER_VARIABLE,
    forget_process,
    gateway_families,
    render_all,
)
from outrider.gateway.metrics.requests import REFUSAL_REASONS, GatewayMetrics, refusal_of
from outrider.links.cluster_view import ClusterView, ReplicaView

# A gateway process as far as it counts: it says when it has, and lives until its input ends.
CHILD = """
import sys
from outrider.gateway.metrics.requests import GatewayMetrics
metrics = GatewayMetrics()
metrics.active.inc(2)
metrics.of("m").finished["stop"].inc()
for now_s in range(3):
    metrics.add_tokens("m", 4, 0.02, float(now_s))
metrics.flush()
print("counted", flush=True)
sys.stdin.read()
"""


@contextmanager
def counting_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env=os.environ | {FOLDER_VARIABLE: str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "counted\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


# The same with the page as the process itself shows it.
FULL_CHILD = """
import errno, os, sys
from outrider.gateway.metrics import files
from outrider.gateway.metrics.requests import GatewayMetrics
from outrider.gateway.metrics.page import gateway_families, page_of
from outrider.logs import setup_logging

setup_logging()
left = int(sys.argv[1])  # allocations that succeed; below 0: the system decides
allocate = os.posix_fallocate
def allocate_or_fail(*place):
    global left
    left -= 1
    if left == -1:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    allocate(*place)
os.posix_fallocate = allocate_or_fail
metrics = GatewayMetrics()
for number in range(8):  # several times what a file holds at first
    metrics.of(f"m{number}").finished["stop"].inc()
for now_s in range(3):
    metrics.add_tokens("m1", 4, 0.02, float(now_s))
metrics.flush()
print(page_of(gateway_families(metrics.registry), False).decode())
"""
FULL_DISK = """
mount -t tmpfs -o size=$3k none "$1" && head -c 1048576 /dev/zero > "$1/rest" 2> /dev/null
test "$4" = empty && rm "$1/rest"
exec "$2" -c "$5" -1
"""


def check_counted(process: subprocess.CompletedProcess[str]) -> None:
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("are counted in memory") == 1, process.stderr
    page = Page(process.stdout)
    assert page["outrider:metrics_in_memory"] == 1
    assert page.by("outrider:generation_tokens_total", "model")["m1"] == 12
    assert page.by("outrider:inter_token_latency_seconds_count", "model")["m1"] == 12
    finished = {
        f'outrider:request_success_total{{model="m{i}",reason="stop"}} 1.0' for i in range(8)
    }
    assert finished <= set(process.stdout.splitlines())


@pytest.mark.parametrize("num_allocations", range(5))
def test_counts_are_in_memory_where_the_disk_has_no_room(
    tmp_path: Path, num_allocations: int
) -> None:
    """For a first file, for a later one, or for one that grows."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_CHILD, str(num_allocations)],
        env=os.environ | {FOLDER_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    check_counted(done)
    page_of(tmp_path)  # what is left there can be read
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("folder", ["missing", "a-file"])
def test_counts_are_in_memory_without_a_folder(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a-file").touch()
    done = subprocess.run(
        [sys.executable, "-c", FULL_CHILD, "-1"],
        env=os.environ | {FOLDER_VARIABLE: str(tmp_path / folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    check_counted(done)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which takes root")
@pytest.mark.parametrize("size_kb, state", [(64, "full"), (200, "empty")])
def test_a_full_file_system_ends_no_gateway(tmp_path: Path, size_kb: int, state: str) -> None:
    """Full from the start, or too small for what is counted later."""
    script = [FULL_DISK, "sh", str(tmp_path), sys.executable, str(size_kb), state, FULL_CHILD]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", *script],
        env=os.environ | {FOLDER_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace: {done.stderr.strip()}")
    check_counted(done)


def page_of(folder: Path) -> Page:
    return Page(render_all(folder, "m", {}).decode())


def test_several_processes_add_up_and_a_dead_ones_counts_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(counting_process(tmp_path))
        stack.enter_context(counting_process(tmp_path))
        both = page_of(tmp_path)
        first.kill()
        first.wait(60)
        forget_process(tmp_path, first.pid)
        left = page_of(tmp_path)
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
        seen_by_any = {each.name: each for each in gateway_families(GatewayMetrics().registry)}
    assert (both["outrider:gateway_processes"], left["outrider:gateway_processes"]) == (2, 1)
    assert (both["outrider:active_requests"], left["outrider:active_requests"]) == (4, 2)
    for page in (both, left):
        assert page["outrider:generation_tokens_total"] == 24
        assert page["outrider:inter_token_latency_seconds_count"] == 24
        assert page["outrider:inter_token_latency_seconds_sum"] == pytest.approx(0.12)
        assert page.by("outrider:request_success_total", "reason") == {"stop": 2}
        assert page["outrider:engine_up"] == 0
    assert seen_by_any["outrider:generation_tokens"].samples[0].value == 24


def test_a_page_of_a_folder_has_vllms_names_too(tmp_path: Path) -> None:
    with counting_process(tmp_path):
        page = Page(render_all(tmp_path, "m", {}, with_vllm=True).decode())
    assert page["vllm:generation_tokens_total"] == 12
    assert page.by("vllm:request_success_total", "finished_reason") == {"stop": 1}


def test_restarts_are_told_by_whoever_starts_the_processes(tmp_path: Path) -> None:
    cluster = ClusterView("controller", "serving", 3, 5, ())
    page = Page(render_all(tmp_path, "m", {}, cluster).decode())
    assert page["outrider:engine_restarts_total"] == 3
    assert page["outrider:draft_restarts_total"] == 5


def test_a_controller_tells_how_many_replicas_there_should_be_and_how_long_they_took(
    tmp_path: Path,
) -> None:
    replicas = (
        ReplicaView("0", "serving", 0, 0, 1.5, 20.0),
        ReplicaView("1", "placing", 0, 0, placement_s=300.0),
    )
    cluster = ClusterView("controller", "serving", 0, 0, (), replicas, num_configured=3)
    statuses = dict.fromkeys(("0", "1"))
    page = Page(render_all(tmp_path, "m", statuses, cluster).decode())
    assert page["outrider:replicas_configured"] == 3
    assert page["outrider:replicas_ready"] == 1
    assert page.by("outrider:replica_placement_seconds", "replica") == {"0": 1.5, "1": 300.0}
    assert page.by("outrider:replica_start_seconds", "replica") == {"0": 20.0}


def test_gaps_fall_where_observing_them_one_by_one_would_put_them() -> None:
    tallied, observed = GatewayMetrics(), GatewayMetrics()
    gaps = [(3, 0.003), (1, 0.0025), (2, 0.00501), (5, 1000.0), (1, 0.0), (4, 0.3)]
    histogram = observed.of("m").gaps
    for count, gap_s in gaps:
        tallied.add_tokens("m", count, gap_s, now_s=0.0)
        for _ in range(count):
            histogram.observe(gap_s / count)
    tallied.flush()

    def samples(metrics: GatewayMetrics) -> dict[tuple[str, str], float]:
        (family,) = (
            each
            for each in metrics.registry.collect()
            if each.name.endswith("inter_token_latency_seconds")
        )
        return {
            (each.name, each.labels.get("le", "")): each.value
            for each in family.samples
            if not each.name.endswith("_created")
        }

    assert samples(tallied) == pytest.approx(samples(observed))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RequestError("x"), "invalid"),
        (UnknownModelError("x"), "unknown_model"),
        (CapacityError("x"), "overloaded"),
        (RateLimitError("x"), "rate_limit"),
        (DeadlineError("x"), "error"),
        (ConfigError("x"), "error"),
    ],
)
def test_every_error_has_one_of_the_reasons(error: OutriderError, reason: str) -> None:
    assert refusal_of(error) == reason
    assert reason in REFUSAL_REASONS


def test_labels_are_few_and_none_is_a_clients() -> None:
    labels = {label for each in METRICS for label in each.labels}
    assert labels == {"model", "replica", "role", "reason", "position"}
    assert len(BY_NAME) == len(METRICS)
    for each in METRICS:
        assert each.text.endswith(".") and each.source in MetricSource and each.kind in MetricKind
