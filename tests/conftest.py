"""Shared by every test: child processes must find the package too (pytest's `pythonpath` does not
reach them), and nothing may ask a model hub for anything."""

import json
import logging
import os
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).resolve().parent
SRC = TESTS.parent / "src"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


# Whoever uses these starts servers or ranks, which need the cores and are waited for.
STARTING_PROCESSES = frozenset(
    {"cluster_tools", "process_tools", "hosts", "kubelet", "pod_cluster"}
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kill-table", type=Path, metavar="FILE", help="write what kills cost into this table"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Only `-m gpu` sees a GPU: everything else expects the CPU, where float32 is the default and
    GPU kernels run in Triton's interpreter, which must be chosen before Triton is imported."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"
    if "PYTEST_XDIST_WORKER" in os.environ:  # there is one for each core
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start processes `alone` and listed cases `slow`, before marks decide what
    runs; then sort files, the longest first, so that parallel workers end together."""
    slow_cases = tomllib.loads((TESTS / "slow_cases.toml").read_text(encoding="utf-8"))
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        if item.get_closest_marker("ray") is not None or _starts_processes(item.module):
            item.add_marker(pytest.mark.alone)
        if _is_slow_case(item, slow_cases):
            item.add_marker(pytest.mark.slow)
    durations = json.loads((TESTS / "durations.json").read_text(encoding="utf-8"))
    items.sort(key=lambda item: -durations.get(_relative(item), 0.0))


def _relative(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""


def _is_slow_case(item: pytest.Function, slow_cases: dict[str, list[str]]) -> bool:
    keep = slow_cases.get(f"{_relative(item)}::{item.originalname}")
    if keep is None:
        return False
    case = item.callspec.id if hasattr(item, "callspec") else ""
    return not any(fnmatchcase(case, pattern) for pattern in keep)


@cache
def _starts_processes(module: ModuleType) -> bool:
    used = {getattr(value, "__module__", None) for value in vars(module).values()}
    return not STARTING_PROCESSES.isdisjoint(used)


@pytest.fixture(autouse=True)
def _restored_logger() -> Iterator[None]:
    """What a test tells our logger does not reach the next one. By `setLevel`, not by assignment:
    loggers remember which levels they write until it is called."""
    logger = logging.getLogger("outrider")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """More only slow small models down, and far more so on a machine that does other work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
