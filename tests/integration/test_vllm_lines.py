"""Public lines of `vllm serve`, with a small checkpoint in the place of the model: they start."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_tools import ServeProcess
from head_checkpoints import save_spelling
from vllm_page import Line, judge, lines

from outrider.client import Client

pytestmark = pytest.mark.model

HEAD = "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"
KEY = "token-abc123"
# A part of the line, and who proposes.
STARTED = {
    "Qwen/Qwen3-8B --max-num-batched": "ngram",
    HEAD: "eagle3",
    '"method": "ngram"': "ngram",
    f"--api-key {KEY}": "ngram",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("spelling")
    save_spelling(made)
    return made


def line_with(part: str) -> Line:
    [found] = [each for each in lines() if part in " ".join(each.text.replace("\\\n", " ").split())]
    return found


@pytest.mark.parametrize(("part", "proposer"), STARTED.items(), ids=lambda value: str(value)[:20])
def test_a_line_whose_flags_all_map_starts(part: str, proposer: str, folder: Path) -> None:
    line = line_with(part)
    assert not judge(line.args).refused and not judge(line.args).ignored
    _, *flags = line.args
    flags = [flag.replace(HEAD, str(folder / "head")) for flag in flags]
    with ServeProcess(str(folder / "target"), *flags, "--no-ray") as server:
        server.wait_ready().close()
        with Client(server.grpc_address, api_key=KEY if KEY in line.args else None) as client:
            params = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
            found = client.generate("abcabcabcabc", **params)
            plain = client.generate("abcabcabcabc", **params, speculation="off")
            settings = client.status().settings
        assert settings is not None and settings.method == proposer
        assert found.token_ids == plain.token_ids and len(found.token_ids) == 24
        if part in (HEAD, '"method": "ngram"'):
            assert "as settings" in server.output
        server.terminate()
        assert server.wait() == 0
