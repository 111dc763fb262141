"""Starts that fail or are broken off: the reason is told, and nothing is left running."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
from cluster_tools import ServeProcess

from outrider.checkpoints.resolve import resolve_source

pytestmark = [pytest.mark.ray, pytest.mark.model]

MODEL = "smollm2-135m-draft"


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A checkpoint that looks right until its weights are read: they are another model's."""
    folder = tmp_path / "damaged"
    shutil.copytree(resolve_source(MODEL), folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings["intermediate_size"] *= 2
    path.write_text(json.dumps(settings))
    return folder


def test_a_model_that_does_not_exist_is_refused_before_anything_is_started() -> None:
    with ServeProcess("--model", "/no/such/model") as server:
        assert server.wait() == 1
        assert "error: model '/no/such/model'" in server.output
        assert "Ray started" not in server.output


def test_a_port_that_is_taken_is_refused_before_anything_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServeProcess("--model", MODEL, "--port", str(port)) as server:
            assert server.wait() == 2
            assert server.lines[1:] == [
                f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another "
                "--port.\n"
            ]
            assert server.left_files() == []


def test_a_file_that_is_cut_short_is_told_once_and_the_ray_that_was_starting_ends(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(resolve_source(MODEL), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with ServeProcess("--model", str(folder)) as server:
        assert server.wait() == 1
        assert server.output.count("is damaged or incomplete") == 1
        assert "Ray started" not in server.output
        server.wait_nothing_left()
        assert server.left_files() == []


def test_a_cluster_that_does_not_answer_is_told() -> None:
    with ServeProcess("--model", MODEL, "--set", "cluster.address=127.0.0.1:1") as server:
        assert server.wait() == 2
        assert "cluster.address is '127.0.0.1:1' but no Ray cluster can be used" in server.output


def test_a_cluster_without_room_is_told_in_one_sentence() -> None:
    with ServeProcess("--model", MODEL, "--set", "target.device=cuda") as server:
        assert server.wait() == 1
        assert "error: target: 1 rank needs 1 GPU and 1 CPU, but the cluster has 0 GPUs" in (
            server.output
        )
        server.wait_nothing_left()
        assert server.left_files() == []


def test_a_rank_that_fails_to_start_shows_its_own_last_lines(damaged: Path) -> None:
    with ServeProcess("--model", MODEL, "--draft-model", str(damaged)) as server:
        assert server.wait(60) == 1
        assert "draft rank 0 | " in server.output
        assert "error: draft rank 0 failed: " in server.output
        assert "config.json and weights do not belong together" in server.output
        server.wait_nothing_left()
        assert server.left_files() == []


def test_a_server_that_is_killed_takes_its_processes_along() -> None:
    with ServeProcess("--model", MODEL) as server:
        server.wait_line("placed")
        assert len(server.left_pids()) > 3
        server.kill()
        server.wait()
        server.wait_nothing_left()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_and_leaves_no_process() -> None:
    with ServeProcess("--model", MODEL) as server:
        server.wait_line("placed")
        server.interrupt()
        server.wait_line("stopping")
        server.interrupt()
        assert server.wait(5) in (0, 130)  # 0 if the first was quicker
        server.wait_nothing_left()
