"""A bar for the stages of a start that take long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

logger = logging.getLogger(__name__)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields what to call after each of `total` parts. The bar is shown on terminals only and goes
    when all is done; the time it took stays in the log."""
    start_s = time.perf_counter()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = console.is_terminal and total > 0
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
    logger.info("%s: %d in %.1f s", what, total, time.perf_counter() - start_s)
