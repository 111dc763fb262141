"""The commands that `outrider serve` prints, run as they stand there, give sensible text."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from cluster_tools import ServeProcess
from markdown_tools import ROOT

from outrider.client import Client

pytestmark = [pytest.mark.model, pytest.mark.alone]

LIMIT_S = 400.0
DEFAULTS = {"temperature": 0.2, "top_p": 0.9}


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    """The bundled pair at its defaults, as `make serve` starts it, but for the ports."""
    with ServeProcess("--no-ray") as server:
        server.wait_ready().close()
        yield server


def printed(server: ServeProcess) -> list[str]:
    """What the message of a ready server has indented."""
    message = server.output.partition("try it in another terminal:")[2]
    return re.findall(r"^ {4}(\S.*)$", message, re.MULTILINE)


def run(command: str, said: str = "") -> str:
    """In a shell, from the folder that the server was started in."""
    done = subprocess.run(
        ["bash", "-c", command],
        input=said,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def is_sensible(text: str) -> bool:
    """Of the question that is printed: so are the answers of 200 seeds at the defaults."""
    return "process" in text and ("carbon dioxide" in text or "light" in text)


def test_every_printed_command_gives_sensible_text(server: ServeProcess) -> None:
    curl, openai, chat, status = printed(server)
    assert shutil.which("curl"), "the first command needs curl"
    assert "temperature" not in curl + openai + chat
    for _ in range(3):  # without a seed each is another sample
        answer = json.loads(run(curl))
        assert answer["choices"][0]["text"].startswith(" Paris")
        assert is_sensible(run(openai))
    assert is_sensible(run(chat, "In one sentence, what is photosynthesis?"))
    assert re.search(r"^state +serving *$", run(status), re.MULTILINE)


def test_the_server_says_which_defaults_requests_get(server: ServeProcess) -> None:
    server.wait_line(r"the checkpoint's defaults: temperature 0\.2, top_p 0\.9 ")
    with Client(server.grpc_address) as client:
        assert client.model_info().sampling_defaults == DEFAULTS


def test_requests_get_the_same_text_by_the_defaults_and_by_naming_them(
    server: ServeProcess,
) -> None:
    """Over gRPC; a seed makes one sample of each."""
    with Client(server.grpc_address) as client:

        def text(**params: float) -> str:
            return client.generate("Once upon a time", seed=3, max_tokens=16, **params).text

        assert text() == text(**DEFAULTS) != text(temperature=1.0, top_p=1.0)
