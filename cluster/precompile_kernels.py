"""Compiles the C kernels for ranks on this host while Ray and PyTorch start."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.cluster.host_gpus import has_gpu_driver
from outrider.config import EngineConfig
from outrider.kernels.cpu.build import find_compiler, library_path
from outrider.kernels.cpu.compiling import Compiler
from outrider.kernels.errors import KernelUnavailableError
from outrider.progress_stages import stage

logger = logging.getLogger(__name__)


@contextmanager
def precompile_kernels(config: EngineConfig) -> Iterator[None]:
    """Compile in a thread within this context. The ranks compile what is left at its end."""
    if not _are_used(config):
        yield
        return
    try:
        compiler = find_compiler()
    except KernelUnavailableError:  # ranks report it
        yield
        return
    thread = threading.Thread(
        target=_compile, args=(compiler,), name="outrider-kernels", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        compiler.stop()
        thread.join()


def _are_used(config: EngineConfig) -> bool:
    if config.cpu_kernels == "torch" or config.cluster.address is not None:
        return False
    device, dtype = config.target.device, config.target.dtype
    is_cpu = device == "cpu" or (device == "auto" and not has_gpu_driver())
    return is_cpu and dtype in ("auto", "float32")


def _compile(compiler: Compiler) -> None:
    try:
        with stage("compiling CPU kernels") as update:
            library_path(update, compiler)
    except KernelUnavailableError as error:  # ranks retry and report it
        logger.debug("CPU kernels are not precompiled: %s", error)
