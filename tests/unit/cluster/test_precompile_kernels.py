"""Kernels that a server compiles before its ranks ask for them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from c_kernels import skip_without_compiler

from outrider.cluster import host_gpus, precompile_kernels
from outrider.config import EngineConfig


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled ahead."""
    found: list[str] = []
    monkeypatch.setattr(precompile_kernels, "library_path", lambda *_: found.append("kernels"))
    return found


def config(**options: object) -> EngineConfig:
    return EngineConfig.from_kwargs(**options)


@pytest.mark.parametrize(
    ("options", "has_driver", "are_wanted"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"device": "cpu"}, True, True),
        ({"device": "cpu", "dtype": "float32"}, True, True),
        ({"dtype": "bfloat16"}, False, False),
        ({"cpu_kernels": "torch"}, False, False),
        ({"ray_address": "auto"}, False, False),
    ],
)
def test_kernels_are_compiled_ahead_where_ranks_of_this_host_use_them(
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: dict[str, object],
    has_driver: bool,
    are_wanted: bool,
) -> None:
    skip_without_compiler()
    driver = tmp_path / "driver"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(host_gpus, "_DRIVERS", (driver,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with precompile_kernels.precompile_kernels(config(**options)):
        pass
    assert asked == ["kernels"] * are_wanted


def test_gpus_that_are_hidden_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_gpus, "_DRIVERS", (tmp_path,))
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not host_gpus.has_gpu_driver() and host_gpus.num_gpus() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert host_gpus.has_gpu_driver()


def test_a_server_that_ends_does_not_wait_for_the_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\nsleep 600\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    began_s = time.monotonic()
    with precompile_kernels.precompile_kernels(config(device="cpu")):
        while not list(tmp_path.glob("cache/kernels/.cpu-*/headers")):
            time.sleep(0.01)
    assert time.monotonic() - began_s < 60
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []
