"""What passes took when models were first started, for those that take their place and for servers
after this one.

Timing passes takes longer than the rest of a start. Within the life of a server, which its secret
stands for, the same model on the same host takes what it took before. What another server measured
is for whoever reads it to check. Steps put the tables right in any case.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from outrider.scheduler.costs import CostTable, StepCosts
from outrider.workers.proposers.base import NO_COST
from outrider.workers.weights.cache import boot_id, cache_folder, read_own, write_own

logger = logging.getLogger(__name__)

FORMAT_VERSION = "2"
UNUSED_S = 7 * 24 * 3600.0
_TABLES = ("verify", "first_draft", "next_draft")


class Found(NamedTuple):
    """What was kept."""

    costs: StepCosts
    is_own: bool  # by a process of the same server


class KeptCosts:
    """Of one process, or one group of ranks, of a server; `about` is all that they depend on.

    What a group has no passes for costs nothing. No file tells anything about the secret.
    """

    def __init__(self, secret: str, *about: object) -> None:
        text = repr((FORMAT_VERSION, boot_id(), about)).encode()
        self._server = hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()
        self._path = cache_folder() / "costs" / f"{hashlib.sha256(text).hexdigest()[:32]}.json"

    def read(self) -> Found | None:
        """None if there is nothing, or nothing of use."""
        try:
            found = json.loads(read_own(self._path))
            verify, first, following = (
                CostTable(tuple(sizes), tuple(seconds), is_padded)
                for sizes, seconds, is_padded in (found[name] for name in _TABLES)
            )
            costs = StepCosts(verify, first, following, prefill_s=found["prefill_s"])
            return Found(costs, hmac.compare_digest(found["server"], self._server))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.info("passes are timed again: %s: %s", self._path, error)
            return None

    def write(self, costs: StepCosts) -> None:
        """See `write_tables`."""
        tables = (costs.verify, costs.first_draft, costs.next_draft)
        self.write_tables(*tables, costs.prefill_s)

    def write_tables(
        self,
        verify: CostTable | None,
        first_draft: CostTable | None,
        next_draft: CostTable | None,
        prefill_s: float,
    ) -> None:
        """Where it cannot be written, passes are timed again next time."""
        tables = (table or NO_COST for table in (verify, first_draft, next_draft))
        rows = [(table.sizes, table.seconds, table.is_padded) for table in tables]
        further = {"prefill_s": prefill_s, "server": self._server}
        text = json.dumps(dict(zip(_TABLES, rows, strict=True)) | further)
        with suppress(OSError):
            write_own(self._path, text)
            _sweep(self._path.parent)


def _sweep(folder: Path) -> None:
    """Of servers that are gone."""
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()
