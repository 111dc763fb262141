"""Shared by every test: child processes must find the package too (pytest's `pythonpath` does not
reach them), and nothing may ask a model hub for anything."""

import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
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
    """Tests that start processes are marked `alone`, before marks decide what runs."""
    for item in items:
        if isinstance(item, pytest.Function) and (
            item.get_closest_marker("ray") is not None or _starts_processes(item.module)
        ):
            item.add_marker(pytest.mark.alone)


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
