"""llama.cpp's server with one set of settings: inside this process, from the package `xllamacpp`,
or a `llama-server` compiled for the machine, as a child process.

Both serve `/completion`, which takes and returns token ids; that costs a millisecond a call.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.error import URLError

from outrider.benchmarks.peers.protocol import Mode, Options
from outrider.loadtest.servers import keeper

SLOTS = 8
HOST = "127.0.0.1"
READY_TIMEOUT_S, ANSWER_TIMEOUT_S, END_TIMEOUT_S = 120.0, 600.0, 10.0
POLL_S = 0.05
WARNINGS = 2  # log level: warnings and errors
CONTENT_TYPE = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """Tunable settings, with the defaults of llama.cpp."""

    threads: int
    flash_attn: str = "on"  # what "auto" resolves to on a CPU
    kv_type: str = "f16"
    batch: int = 2048
    ubatch: int = 512
    mmap: bool = True


class LlamaServer(Protocol):
    @property
    def address(self) -> str: ...

    def close(self) -> None: ...


def start_server(options: Options, settings: LlamaSettings, mode: Mode) -> LlamaServer:
    if mode.method not in ("off", "draft"):
        raise ValueError(f"llama.cpp has no draft method {mode.method!r} here; name off or draft.")
    start = PackageServer if options.executable is None else ProgramServer
    return start(options, settings, mode)


def program_version(executable: str) -> str:
    """The program's version, in one line."""
    said = subprocess.run(
        [executable, "--version"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=READY_TIMEOUT_S,
        text=True,
    )
    return " ".join(said.stdout.split())


def ask(server: LlamaServer, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON of the server's answer; with a body the request is a POST."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.address + path, data, CONTENT_TYPE)
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
        return json.load(answer)


class PackageServer:
    """From `xllamacpp`, whose wheels are compiled for generic processors."""

    def __init__(self, options: Options, settings: LlamaSettings, mode: Mode) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = options.target
        params.hostnames, params.port = [HOST], 0
        params.n_parallel, params.n_ctx = SLOTS, SLOTS * options.max_model_len
        # Separate contexts: slots cannot evict each other's KV, and share no prefixes.
        params.kv_unified, params.fit_params = False, False
        params.cache_prompt, params.cache_ram_mib = False, 0
        params.ui, params.verbosity = False, WARNINGS
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.threads
        params.flash_attn_type = (
            xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if settings.flash_attn == "on"
            else xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{settings.kv_type.upper()}")
        params.cache_type_k = params.cache_type_v = kind
        params.n_batch, params.n_ubatch = settings.batch, settings.ubatch
        loading = xllamacpp.llama_load_mode
        params.load_mode = (
            loading.LLAMA_LOAD_MODE_MMAP if settings.mmap else loading.LLAMA_LOAD_MODE_NONE
        )
        if mode.method == "draft":
            types = xllamacpp.common_speculative_type
            params.speculative.types = [types.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            draft = params.speculative.draft
            draft.mparams.path = options.draft
            draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = settings.threads
            draft.cache_type_k = draft.cache_type_v = kind
            if mode.depth is not None:
                draft.n_max = mode.depth
        self._server = xllamacpp.Server(params)
        self.address: str = self._server.listening_address

    def close(self) -> None:
        del self._server  # ends its threads and frees the model


class ProgramServer:
    """`llama-server`, killed by a keeper process however this process ends."""

    def __init__(self, options: Options, settings: LlamaSettings, mode: Mode) -> None:
        with socket.socket() as bound:
            bound.bind((HOST, 0))
            port = bound.getsockname()[1]
        assert options.executable is not None
        command = [options.executable, *program_arguments(options, settings, mode, port)]
        kept = [sys.executable, "-I", keeper.__file__, str(os.getpid()), str(END_TIMEOUT_S)]
        self.address = f"http://{HOST}:{port}"
        self._process = subprocess.Popen([*kept, *command], stdin=subprocess.DEVNULL)
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(END_TIMEOUT_S + keeper.KILL_S)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"llama-server ended with code {code} before it was ready.")
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=READY_TIMEOUT_S):
                    return
            except (URLError, OSError):  # not listening yet, or loading the model
                time.sleep(POLL_S)
        raise RuntimeError(f"llama-server was not ready after {READY_TIMEOUT_S:.0f} s.")


def program_arguments(
    options: Options, settings: LlamaSettings, mode: Mode, port: int
) -> list[str]:
    drafting: dict[str, object] = {}
    if mode.method == "draft":
        drafting = {
            "--spec-type": "draft-simple",
            "--spec-draft-model": options.draft,
            "--spec-draft-threads": settings.threads,
            "--spec-draft-type-k": settings.kv_type,
            "--spec-draft-type-v": settings.kv_type,
        }
        if mode.depth is not None:
            drafting["--spec-draft-n-max"] = mode.depth
    named: dict[str, object] = {
        "--model": options.target,
        "--host": HOST,
        "--port": port,
        "--parallel": SLOTS,
        "--ctx-size": SLOTS * options.max_model_len,
        "--threads": settings.threads,
        "--threads-batch": settings.threads,
        "--flash-attn": settings.flash_attn,
        "--cache-type-k": settings.kv_type,
        "--cache-type-v": settings.kv_type,
        "--batch-size": settings.batch,
        "--ubatch-size": settings.ubatch,
        "--load-mode": "mmap" if settings.mmap else "none",
        "--cache-ram": 0,
        "--log-verbosity": WARNINGS,
        **drafting,
    }
    flags = ["--no-kv-unified", "--no-cache-prompt", "--no-ui", "--fit", "off"]
    return [*flags, *(str(part) for pair in named.items() for part in pair)]
