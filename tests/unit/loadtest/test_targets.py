"""Addresses, rounds and retries: what targets share."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import subprocess
import sys
from email.utils import format_datetime
from typing import Any

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from outrider.errors import ConfigError
from outrider.loadtest.targets import Reply, TargetFault, TargetSpec, make_target
from outrider.loadtest.targets.openai import fault_of
from outrider.loadtest.targets.retries import OverloadedFault, retry_after_s, with_retries
from outrider.loadtest.targets.rounds import add_counts, rounds_by_accepted


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("http://localhost:8000", "OpenAiTarget"),
        ("https://host/api/v1", "OpenAiTarget"),
        ("grpc://localhost:50051", "GrpcTarget"),
        ("grpcs://[::1]:443", "GrpcTarget"),
        ("inprocess:", "InProcessTarget"),
        ("inprocess:?num_speculative_tokens=3&deterministic=true", "InProcessTarget"),
    ],
)
def test_the_scheme_of_an_address_chooses_the_target(url: str, kind: str) -> None:
    assert type(make_target(TargetSpec(url))).__name__ == kind


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost:8000", "ftp://host", "http://", "grpc://host", "grpc://host:1/path"),
        *("http://host:port", "grpc://host:99999", "inprocess:?x", "inprocess://host"),
    ],
)
def test_a_wrong_address_is_one_sentence(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_target(TargetSpec(url))
    assert str(caught.value).count("\n") == 0 and "give" in str(caught.value)


@pytest.mark.parametrize("url", ["grpc://host:1", "inprocess:"])
def test_extras_that_are_no_parameters_are_refused_before_the_run(url: str) -> None:
    with pytest.raises(ConfigError, match="unknown sampling parameter 'depht'"):
        make_target(TargetSpec(url, extras={"depht": 3}))


def test_grpc_cannot_leave_a_certificate_unchecked() -> None:
    with pytest.raises(ConfigError, match="GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"):
        make_target(TargetSpec("grpcs://host:1", insecure=True))


def test_a_key_is_never_printed() -> None:
    assert "secret" not in repr(TargetSpec("http://host", api_key="secret"))


@pytest.mark.parametrize(
    ("drafted", "counts"),
    [
        ("", []),
        ("T", [1]),
        ("TTT", [3]),
        ("TDDTDTT", [2, 1, 1]),
        ("DDD", [0, 0, 0, 1]),  # ended within the drafts
        ("TDTD", [1, 2]),
    ],
)
def test_a_token_of_the_target_closes_a_round(drafted: str, counts: list[int]) -> None:
    assert rounds_by_accepted(each == "D" for each in drafted) == counts


def test_counts_of_samples_are_added_entry_by_entry() -> None:
    total = [1, 2]
    add_counts(total, [1, 0, 4])
    add_counts(total, [])
    assert total == [2, 2, 4]


# -- retries ----------------------------------------------------------------------------------


def run_attempts(faults: list[TargetFault | None], limit: int) -> tuple[int, Reply, Any]:
    reply, made = Reply(), 0

    async def attempt() -> None:
        nonlocal made
        made += 1
        if (fault := faults[made - 1]) is not None:
            raise fault

    try:
        asyncio.run(with_retries(attempt, reply, limit))
    except TargetFault as fault:
        return made, reply, fault
    return made, reply, None


def test_a_refusal_is_tried_again_as_often_as_allowed_and_counted() -> None:
    refused = [OverloadedFault("http 429", after_s=0.0) for _ in range(3)]
    assert run_attempts([*refused[:2], None], 2)[2] is None
    made, reply, fault = run_attempts([*refused], 2)
    assert (made, reply.retries, fault.kind) == (3, 2, "http 429")


def test_nothing_is_tried_again_unless_asked() -> None:
    made, reply, fault = run_attempts([OverloadedFault("http 503")], 0)
    assert (made, reply.retries, fault.kind) == (1, 0, "http 503")


def test_other_faults_are_never_tried_again() -> None:
    assert run_attempts([TargetFault("http 500")], 5)[0] == 1


def test_retry_after_may_be_seconds_or_a_date() -> None:
    then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=60)
    assert retry_after_s("1.5") == 1.5
    assert 55 < (retry_after_s(format_datetime(then, usegmt=True)) or 0) <= 60
    assert retry_after_s("soon") is None and retry_after_s(None) is None


# -- faults of connections --------------------------------------------------------------------

KEY = ConnectionKey("host", 1, False, True, None, None, None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (aiohttp.ClientConnectorDNSError(KEY, OSError("no such name")), "dns"),
        (aiohttp.ClientConnectorCertificateError(KEY, ssl.CertificateError("expired")), "tls"),
        (aiohttp.ClientConnectorSSLError(KEY, OSError("wrong version")), "tls"),
        (aiohttp.ClientConnectorError(KEY, ConnectionRefusedError(111, "x")), "refused"),
        (aiohttp.ClientConnectorError(KEY, OSError(24, "files")), "client out of handles"),
        (aiohttp.ClientConnectorError(KEY, OSError(113, "no route")), "unreachable"),
        (aiohttp.ServerDisconnectedError(), "reset"),
        (aiohttp.ClientOSError(104, "reset by peer"), "reset"),
        (ConnectionResetError(), "reset"),
        (aiohttp.ClientPayloadError("not completed"), "cut off"),
        (aiohttp.ClientPayloadError("not completed. ConnectionResetError(104)"), "reset"),
    ],
)
def test_failures_of_a_connection_are_told_apart(error: Exception, kind: str) -> None:
    fault = fault_of(error)
    assert fault.kind == kind and str(fault)


def test_choosing_a_target_imports_nothing_that_another_one_speaks_with() -> None:
    script = (
        "import sys, outrider.loadtest.targets as t, outrider.loadtest.fake.__main__\n"
        "print({'grpc', 'aiohttp', 'torch', 'transformers'} & set(sys.modules))\n"
        "t.make_target(t.TargetSpec('http://host'))\n"
        "print({'grpc', 'torch', 'transformers'} & set(sys.modules))\n"
        "t.make_target(t.TargetSpec('grpc://host:1'))\n"
        "print({'torch', 'transformers'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split("\n")[:3] == ["set()"] * 3, done.stdout + done.stderr
