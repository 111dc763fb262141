"""The C kernels of ranks on this host, compiled while Ray and PyTorch come up: ranks of the same
host would else do it first thing."""

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
from outrider.stages import stage

logger = logging.getLogger(__name__)


@contextmanager
def kernels_ahead(config: EngineConfig) -> Iterator[None]:
    """Compiles beside what is done within, as long as that takes; what is not done by then is left
    to the ranks."""
    if not _are_wanted(config):
        yield
        return
    try:
        compiler = find_compiler()
    except KernelUnavailableError:  # ranks say what that means
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


def _are_wanted(config: EngineConfig) -> bool:
    if config.cpu_kernels == "torch" or config.cluster.address is not None:
        return False
    device, dtype = config.target.device, config.target.dtype
    is_cpu = device == "cpu" or (device == "auto" and not has_gpu_driver())
    return is_cpu and dtype in ("auto", "float32")


def _compile(compiler: Compiler) -> None:
    try:
        with stage("compiling CPU kernels") as update:
            library_path(update, compiler)
    except KernelUnavailableError as error:  # ranks try again, and say what that means
        logger.debug("the CPU kernels are not compiled ahead: %s", error)
