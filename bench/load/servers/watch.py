"""A server, or the harness's own clients, once a second: what they use and what they count.

Nothing here raises: what cannot be told is None, and a server that does not answer within a
second is asked again a second later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from outrider.bench.load.runs import Sample
from outrider.bench.load.servers.counters import put_metrics, put_status, speculation_between
from outrider.bench.load.servers.processes import Use, use_of, use_of_tree
from outrider.bench.load.servers.server import Server, base_of

if TYPE_CHECKING:
    import aiohttp

    from outrider.client import AsyncClient

__all__ = ["ServerWatch", "sample_of_processes", "speculation_between"]

PERIOD_S = 1.0
ASK_S = 1.0
_MAX_PAGE = 4 * 2**20  # bytes of /metrics
_HTTP_OK = 200

logger = logging.getLogger(__name__)


class ServerWatch:
    """Samples of one server. `clock` is that of the run."""

    def __init__(self, server: Server, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._client: AsyncClient | None = None

    async def sample(self, arm: str | None = None) -> Sample:
        """The server now; `arm` is the one being measured."""
        sample = Sample(at_s=self._clock(), server=self._server.spec.name, arm=arm)
        try:
            if (use := await asyncio.to_thread(self._use)) is not None:
                _put_use(sample, use)
            if not self._server.is_resting:
                async with asyncio.timeout(ASK_S):
                    await self._count(sample)
        except Exception as error:  # whatever it is, the run is worth more than a sample
            logger.debug("no full sample of %s: %s", sample.server, error)
        return sample

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._client is not None:
            await self._client.close()
        self._session = self._client = None

    def _use(self) -> Use | None:
        root = self._server.root_pid
        if root is None:
            return None
        return use_of_tree(root, counts_root=not self._server.is_running)

    async def _count(self, sample: Sample) -> None:
        url = self._server.url
        if url.startswith("grpc://"):
            put_status(sample, await self._client_of(url).status(ASK_S))
        elif url.startswith(("http://", "https://")):
            from outrider.bench.load.targets.http_body import read_body

            page = base_of(url) + "/metrics"
            async with self._open_session().get(
                page, ssl=self._ssl(), allow_redirects=False
            ) as answer:
                if answer.status == _HTTP_OK:
                    text = await read_body(answer.content, _MAX_PAGE, ASK_S)
                    # The last line of a page that is too long may end within its number.
                    whole = text if len(text) < _MAX_PAGE else text[: text.rfind(b"\n") + 1]
                    put_metrics(sample, whole.decode("utf-8", errors="replace"))

    def _client_of(self, url: str) -> AsyncClient:
        from outrider.client import AsyncClient

        if self._client is None:
            self._client = AsyncClient(urlsplit(url).netloc, api_key=self._server.spec.api_key)
        return self._client

    def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._server.spec.headers,
                # Packing takes the server's time, and a small page unpacks to one without end.
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding",),
            )
        return self._session

    def _ssl(self) -> Any:
        return not self._server.spec.insecure


def sample_of_processes(
    name: str, pids: Sequence[int], at_s: float, arm: str | None = None
) -> Sample:
    """Processes of this machine as if they were a server, for the harness's own clients."""
    sample = Sample(at_s=at_s, server=name, arm=arm)
    _put_use(sample, use_of(pids))
    return sample


def _put_use(sample: Sample, use: Use) -> None:
    sample.processes, sample.cpu_s = use.processes, use.cpu_s
    if use.processes:
        sample.memory_mb, sample.anonymous_mb = use.memory_mb, use.anonymous_mb
        sample.handles, sample.threads = use.handles, use.threads
