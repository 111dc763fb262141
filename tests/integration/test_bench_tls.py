"""Targets over TLS, with a certificate made for the test."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from outrider.loadtest.fake import Script
from outrider.loadtest.fake.grpc_server import FakeGrpcServer
from outrider.loadtest.fake.http_server import FakeOpenAiServer
from outrider.loadtest.requests import BenchRequest
from outrider.loadtest.targets import Reply, TargetFault, TargetSpec, make_target

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

ASK = BenchRequest("q/0", "test", text="Once")
# The root is read from the environment when gRPC starts, so it takes a process of its own.
ASK_OVER_GRPC = """
import asyncio, sys
from outrider.loadtest.requests import BenchRequest
from outrider.loadtest.targets import Reply, TargetSpec, make_target
async def main():
    target = make_target(TargetSpec(sys.argv[1], channels=1, api_key="secret"))
    await target.open()
    reply = Reply()
    await target.send(BenchRequest("q/0", "test", text="Once"), reply)
    print(reply.output_tokens)
    await target.close()
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that nobody but itself vouches for, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    paths = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(["openssl", *kind, *subject, *files], check=True, capture_output=True)
    return paths


def test_an_unknown_certificate_is_refused_unless_it_is_not_to_be_checked(
    certificate: tuple[Path, Path],
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificate)

    async def run() -> None:
        async with asyncio.timeout(10), FakeOpenAiServer(Script(), tls=tls) as server:
            with pytest.raises(TargetFault) as caught:
                await make_target(TargetSpec(server.url)).open()
            assert caught.value.kind == "tls"
            target = make_target(TargetSpec(server.url, insecure=True))
            await target.open()
            reply = Reply()
            await target.send(ASK, reply)
            assert reply.output_tokens == 8
            await target.close()

    asyncio.run(run())


def test_grpc_takes_the_root_it_is_given(certificate: tuple[Path, Path]) -> None:
    pair = certificate[1].read_bytes(), certificate[0].read_bytes()

    async def run() -> bytes:
        credentials = grpc.ssl_server_credentials([pair])
        async with FakeGrpcServer(Script(), credentials=credentials) as server:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", ASK_OVER_GRPC, server.url),
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(certificate[0])},
            )
            try:
                told, _ = await asyncio.wait_for(process.communicate(), 20)
            finally:
                if process.returncode is None:
                    process.kill()
            return told

    assert asyncio.run(run()).split() == [b"8"]
