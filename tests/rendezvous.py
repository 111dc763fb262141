"""A board for ranks that meet in tests: where it is, and stores that reach it."""

from __future__ import annotations

import tempfile
from types import TracebackType

from outrider.links.listener import Listener
from outrider.workers.groups.link_store import LinkStore

SECRET = "a secret of the tests"
TIMEOUT_S = 60.0


class OpenRendezvous:
    """Stands as long as the context does. `address` is for processes: `LinkStore(address, ...)`."""

    def __init__(self, num_ranks: int = 4) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-")
        self.address = f"unix:{self._folder.name}/board.sock"
        self.listener = Listener([self.address], SECRET, {"target": num_ranks})
        self._stores: list[LinkStore] = []

    def store(self) -> LinkStore:
        store = LinkStore(self.address, SECRET, TIMEOUT_S)
        self._stores.append(store)
        return store

    def __enter__(self) -> OpenRendezvous:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for store in self._stores:
            store.close()
        self.listener.close()
        self._folder.cleanup()
