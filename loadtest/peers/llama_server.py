"""llama.cpp as an HTTP server, from the Python package `xllamacpp`, whose interpreter runs this.

    python loadtest/peers/llama_server.py target.gguf --port 8080 [--draft draft.gguf --depth 2]

Imports nothing of Outrider, which that environment lacks. The prompt cache is off, so that every
request pays for its own prompt, and slots do not share a context, so that none evicts another. A
llama.cpp compiled for the machine takes the same settings as arguments of `llama-server`.
"""

from __future__ import annotations

import argparse
import signal
import threading
from typing import Any


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="GGUF file of the target")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=8, help="requests at once")
    parser.add_argument("--context", type=int, default=2048, help="tokens a slot holds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft", help="GGUF file of the draft")
    parser.add_argument("--depth", type=int, default=2, help="drafts a round")
    return parser.parse_args()


def server_params(arguments: argparse.Namespace) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.hostnames, params.port = [arguments.host], arguments.port
    params.n_parallel = arguments.slots
    params.n_ctx = arguments.slots * arguments.context
    params.kv_unified = False
    params.cont_batching = True
    params.cache_prompt, params.cache_ram_mib = False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    params.endpoint_metrics = True
    if arguments.draft:
        speculative = params.speculative
        kinds = xllamacpp.common_speculative_type
        speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft = speculative.draft
        draft.mparams.path = arguments.draft
        draft.n_max, draft.n_min, draft.p_min = arguments.depth, 0, 0.0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = arguments.threads
    return params


def main() -> None:
    import xllamacpp

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    server = xllamacpp.Server(server_params(parse_arguments()))
    print(f"serving on {server.listening_address}", flush=True)
    while not stopped.wait(1.0):  # signals are only handled between waits
        pass


if __name__ == "__main__":
    main()
