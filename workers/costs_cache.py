"""On-disk cache of measured pass costs, for restarted ranks and for later servers.

Timing passes takes longer than the rest of start-up. Costs measured by the same server (it is
identified by its secret) are reused as they are: the same model runs on the same host. Costs of
another server must be checked by the reader. Steps correct the tables in any case.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from contextlib import suppress
from typing import NamedTuple

from outrider.checkpoints.cache import boot_id, cache_folder, read_own, sweep, write_own
from outrider.scheduler.costs import CostTable, StepCosts
from outrider.workers.proposers.base import NO_COST

logger = logging.getLogger(__name__)

FORMAT_VERSION = "2"
_TABLES = ("verify", "first_draft", "next_draft")


class CachedCosts(NamedTuple):
    """What the cache holds."""

    costs: StepCosts
    is_own: bool  # measured by a process of the same server


class CostsCache:
    """The costs of one process, or one group of ranks, of a server; `about` is the cache key.

    Passes that a group does not run cost nothing. Files reveal nothing about the secret.
    """

    def __init__(self, secret: str, *about: object) -> None:
        text = repr((FORMAT_VERSION, boot_id(), about)).encode()
        self._server = hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()
        self._path = cache_folder() / "costs" / f"{hashlib.sha256(text).hexdigest()[:32]}.json"

    def read(self) -> CachedCosts | None:
        """None if there is no file, or an unusable one."""
        try:
            found = json.loads(read_own(self._path))
            verify, first, following = (
                CostTable(tuple(sizes), tuple(seconds), is_padded)
                for sizes, seconds, is_padded in (found[name] for name in _TABLES)
            )
            costs = StepCosts(verify, first, following, prefill_s=found["prefill_s"])
            return CachedCosts(costs, hmac.compare_digest(found["server"], self._server))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.info("timing passes again: %s: %s", self._path, error)
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
        """If this fails, passes are timed again at the next start."""
        tables = (table or NO_COST for table in (verify, first_draft, next_draft))
        rows = [(table.sizes, table.seconds, table.is_padded) for table in tables]
        rest = {"prefill_s": prefill_s, "server": self._server}
        text = json.dumps(dict(zip(_TABLES, rows, strict=True)) | rest)
        with suppress(OSError):
            write_own(self._path, text)
            sweep(self._path.parent)
