"""Samples resource usage and counters of a server or of the harness's clients.

Never raises: an unavailable value is None, and a server that does not answer within a second is
queried again a second later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from outrider.loadtest.runs import ServerSample
from outrider.loadtest.servers.counters import put_metrics, put_status, speculation_between
from outrider.loadtest.servers.processes import ResourceUsage, use_of, use_of_tree
from outrider.loadtest.servers.server import ServerUnderTest, base_of

if TYPE_CHECKING:
    import aiohttp

    from outrider.client import AsyncClient

__all__ = ["ServerWatch", "sample_of_processes", "speculation_between"]

PERIOD_S = 1.0
QUERY_TIMEOUT_S = 1.0
_MAX_PAGE = 4 * 2**20  # bytes of /metrics
_HTTP_OK = 200

logger = logging.getLogger(__name__)


class ServerWatch:
    """Samples one server. `clock` is the run's."""

    def __init__(
        self, server: ServerUnderTest, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server = server
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._client: AsyncClient | None = None

    async def sample(self, arm: str | None = None) -> ServerSample:
        """Samples the server now; `arm` is being measured."""
        sample = ServerSample(at_s=self._clock(), server=self._server.spec.name, arm=arm)
        try:
            if (use := await asyncio.to_thread(self._use)) is not None:
                _put_use(sample, use)
            if not self._server.is_resting:
                async with asyncio.timeout(QUERY_TIMEOUT_S):
                    await self._count(sample)
        except Exception as error:  # no error of a sample may end the run
            logger.debug("no full sample of %s: %s", sample.server, error)
        return sample

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._client is not None:
            await self._client.close()
        self._session = self._client = None

    def _use(self) -> ResourceUsage | None:
        root = self._server.root_pid
        if root is None:
            return None
        return use_of_tree(root, counts_root=not self._server.is_running)

    async def _count(self, sample: ServerSample) -> None:
        url = self._server.url
        if url.startswith("grpc://"):
            put_status(sample, await self._client_of(url).status(QUERY_TIMEOUT_S))
        elif url.startswith(("http://", "https://")):
            from outrider.loadtest.targets.http_body import read_body

            page = base_of(url) + "/metrics"
            async with self._open_session().get(
                page, ssl=self._ssl(), allow_redirects=False
            ) as answer:
                if answer.status == _HTTP_OK:
                    text = await read_body(answer.content, _MAX_PAGE, QUERY_TIMEOUT_S)
                    # A truncated page may end within a number.
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
                # Compression costs the server CPU time, and allows decompression bombs.
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding",),
            )
        return self._session

    def _ssl(self) -> Any:
        return not self._server.spec.insecure


def sample_of_processes(
    name: str, pids: Sequence[int], at_s: float, arm: str | None = None
) -> ServerSample:
    """Samples local processes as if they were a server, for the harness's clients."""
    sample = ServerSample(at_s=at_s, server=name, arm=arm)
    _put_use(sample, use_of(pids))
    return sample


def _put_use(sample: ServerSample, use: ResourceUsage) -> None:
    sample.processes, sample.cpu_s = use.processes, use.cpu_s
    if use.processes:
        sample.memory_mb, sample.anonymous_mb = use.memory_mb, use.anonymous_mb
        sample.handles, sample.threads = use.handles, use.threads
