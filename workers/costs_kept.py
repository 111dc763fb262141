"""What passes took when a server's models were first started, for those that take their place.

Timing passes takes longer than the rest of a start. Within the life of a server, which its secret
stands for, the same model on the same host takes what it took before, and steps put the tables
right in any case.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from outrider.scheduler.costs import CostTable, StepCosts
from outrider.workers.proposers.base import NO_COST
from outrider.workers.weights.cache import boot_id, cache_folder

logger = logging.getLogger(__name__)

FORMAT_VERSION = "1"
UNUSED_S = 7 * 24 * 3600.0
_TABLES = ("verify", "first_draft", "next_draft")


class KeptCosts:
    """Of one process, or one group of ranks, of one server; `about` is all that they depend on.

    What a group has no passes for costs nothing. Names of files tell nothing about the secret.
    """

    def __init__(self, secret: str, *about: object) -> None:
        text = repr((FORMAT_VERSION, boot_id(), about)).encode()
        name = hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()[:32]
        self._path = cache_folder() / "costs" / f"{name}.json"

    def read(self) -> StepCosts | None:
        """None if there is nothing, or nothing of use."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            verify, first, following = (
                CostTable(tuple(sizes), tuple(seconds), is_padded)
                for sizes, seconds, is_padded in (found[name] for name in _TABLES)
            )
            return StepCosts(verify, first, following, prefill_s=found["prefill_s"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.info("passes are timed again: %s: %s", self._path, error)
            return None

    def write(
        self,
        verify: CostTable | None,
        first_draft: CostTable | None,
        next_draft: CostTable | None,
        prefill_s: float,
    ) -> None:
        """Where it cannot be written, passes are timed again next time."""
        tables = (table or NO_COST for table in (verify, first_draft, next_draft))
        rows = [(table.sizes, table.seconds, table.is_padded) for table in tables]
        text = json.dumps(dict(zip(_TABLES, rows, strict=True)) | {"prefill_s": prefill_s})
        scratch = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(self._path.parent)
            scratch.write_text(text, encoding="utf-8")
            scratch.replace(self._path)


def _sweep(folder: Path) -> None:
    """Of servers that are gone."""
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()
