"""Models of a hub, asked by its real client: what is resolved, downloaded, awaited and refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fake_hub import MAIN, FakeHub

from outrider.checkpoints.cache import locked
from outrider.checkpoints.resolve import draft_assets

pytestmark = pytest.mark.thorough

MODEL = "somebody/small"
_LIMIT_S = 60
_HEAD = (
    "from outrider.logs import setup_logging; setup_logging();"
    "from outrider.checkpoints.resolve import *; "
)
_DOWNLOAD = _HEAD + f"print(resolve_source({MODEL!r}, {MAIN!r}).name)"
_SETTLE = (
    "from outrider.config import EngineConfig;"
    "from outrider.engine.preflight import settle_revisions;"
    f"config = EngineConfig.from_kwargs(model={MODEL!r}, draft_model={MODEL!r},"
    f" tokenizer={MODEL!r}, revision={MAIN!r});"
    "once = settle_revisions(config);"
    "again = settle_revisions(once);"
    "print(once.target.revision, once.draft.revision, once.target.tokenizer, once == again)"
)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    files = {name: (draft_assets() / name).read_bytes() for name in names}
    with FakeHub(MODEL, files | {"model.safetensors": b"weights"}) as served:
        yield served


def _start(code: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(code: str, environment: Mapping[str, str]) -> str:
    """What it prints; of one that fails, the end of what it says."""
    with _start(code, environment) as process:
        printed, said = process.communicate(timeout=_LIMIT_S)
    return printed.strip() if process.returncode == 0 else said.strip().splitlines()[-1]


def test_a_branch_is_resolved_to_its_commit_and_a_commit_is_not_asked_about_again(
    hub: FakeHub, tmp_path: Path
) -> None:
    commit = hub.commits[MAIN]
    expected = f"{commit} {commit} {MODEL}@{commit} True"
    assert _run(_SETTLE, hub.environment(tmp_path)) == expected
    assert len(hub.resolutions()) == 3 == len(hub.asked)  # target, tokenizer and draft, once each


def test_what_was_settled_is_downloaded_though_the_branch_has_moved(
    hub: FakeHub, tmp_path: Path
) -> None:
    old = hub.commits[MAIN]
    hub.commits = {MAIN: "b" * 40, "old": old}
    code = _HEAD + f"print(resolve_source({MODEL!r}, {old!r}).name)"
    assert _run(code, hub.environment(tmp_path)) == old
    assert hub.resolutions() == []


def test_a_tokenizer_is_loaded_without_any_weights(hub: FakeHub, tmp_path: Path) -> None:
    code = (
        "from outrider.text.tokenizer import load_tokenizer;"
        f"print(load_tokenizer({MODEL!r}, revision={MAIN!r}).encode('Hello'))"
    )
    assert _run(code, hub.environment(tmp_path)) == "[19556]"
    assert len(hub.downloads("tokenizer.json")) == 1
    assert hub.downloads(".safetensors") == []


def test_models_whose_ranks_are_elsewhere_are_checked_without_their_weights(
    hub: FakeHub, tmp_path: Path
) -> None:
    del hub.files["tokenizer.json"], hub.files["tokenizer_config.json"]  # not needed to serve
    check = (
        "from outrider.config import EngineConfig;"
        "from outrider.engine.preflight import check_models;"
        f"found = check_models(EngineConfig.from_kwargs(model={MODEL!r}), has_weights=False);"
        "print(found.config.target.revision, found.target.num_layers > 0)"
    )
    assert _run(check, hub.environment(tmp_path)) == f"{hub.commits[MAIN]} True"
    assert hub.downloads(".safetensors") == []


def test_two_processes_of_a_host_download_a_model_once(hub: FakeHub, tmp_path: Path) -> None:
    hub.seconds_per_file = 0.3
    environment = hub.environment(tmp_path)
    processes = [_start(_DOWNLOAD, environment) for _ in range(2)]
    printed, said = zip(*(each.communicate(timeout=_LIMIT_S) for each in processes), strict=True)
    assert [each.strip() for each in printed] == [hub.commits[MAIN]] * 2
    assert sum(f"waiting for the download of {MODEL}" in each for each in said) == 1
    assert len(hub.downloads(".safetensors")) == 1


def test_who_waits_for_a_download_says_so_and_goes_on_when_the_other_is_killed(
    tmp_path: Path,
) -> None:
    lock = tmp_path / "lock"
    use = (
        "import pathlib, time; from outrider.logs import setup_logging; setup_logging();"
        "from outrider.checkpoints.cache import locked\n"
        f"with locked(pathlib.Path({str(lock)!r}), 'the download of {MODEL}', WAIT):\n"
        "  print('inside', flush=True); time.sleep(HOLD)"
    )
    with _start(use.replace("WAIT", "1").replace("HOLD", "600"), {}) as holder:
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            impatient = _run(use.replace("WAIT", "0.3").replace("HOLD", "0"), {})
            assert f"ModelError: the download of {MODEL} by another process" in impatient
            assert f"pid {holder.pid} on" in impatient
            with _start(use.replace("WAIT", "60").replace("HOLD", "0"), {}) as waiter:
                assert waiter.stderr is not None
                assert f"waiting for the download of {MODEL}" in waiter.stderr.readline()
                os.kill(holder.pid, signal.SIGKILL)
                assert waiter.communicate(timeout=_LIMIT_S)[0] == "inside\n"
        finally:
            holder.kill()


def test_others_can_neither_hold_a_lock_nor_have_it_lead_elsewhere(tmp_path: Path) -> None:
    with locked(tmp_path / "lock", "a download"):
        assert (tmp_path / "lock").stat().st_mode & 0o077 == 0
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    with locked(tmp_path / "link", "a download"):
        assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.parametrize(("status", "code"), [(401, ""), (403, "GatedRepo"), (403, "")])
def test_a_model_that_the_hub_refuses_says_what_to_do(
    hub: FakeHub, tmp_path: Path, status: int, code: str
) -> None:
    hub.refused, hub.token = (status, code), "let-me-in"
    wanted = f"({status}); set HF_TOKEN or accept the licence of {MODEL}"
    assert wanted in _run(_DOWNLOAD, hub.environment(tmp_path))
    with_token = hub.environment(tmp_path) | {"HF_TOKEN": "let-me-in"}
    assert _run(_DOWNLOAD, with_token) == hub.commits[MAIN]


def test_a_revision_that_is_not_there_is_named(hub: FakeHub, tmp_path: Path) -> None:
    code = _DOWNLOAD.replace(repr(MAIN), "'gone'")
    said = _run(code, hub.environment(tmp_path))
    assert f"model '{MODEL}' has no revision 'gone' on the hub" in said


def test_without_the_hub_what_is_cached_serves_and_the_rest_says_that_it_is_offline(
    hub: FakeHub, tmp_path: Path
) -> None:
    offline = hub.environment(tmp_path) | {"HF_HUB_OFFLINE": "1"}
    assert "and HF_HUB_OFFLINE is set" in _run(_DOWNLOAD, offline)
    assert _run(_DOWNLOAD, hub.environment(tmp_path)) == hub.commits[MAIN]
    asked = list(hub.asked)
    assert _run(_DOWNLOAD, offline) == hub.commits[MAIN]
    assert _run(_SETTLE, offline).startswith(hub.commits[MAIN])
    assert hub.asked == asked
