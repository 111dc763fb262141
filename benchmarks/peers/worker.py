"""One engine's process: `python -m outrider.benchmarks.peers.worker ENGINE`, driven over a pipe.

ENGINE is a name below or `module:Class` of another implementation of `protocol.PeerEngine`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import IO

from outrider.benchmarks.peers.protocol import (
    Options,
    PeerEngine,
    PeerInfo,
    decode_options,
    decode_request,
    encode,
)

ENGINES: Mapping[str, str] = {
    "llama.cpp": "outrider.benchmarks.peers.llama_peer:LlamaEngine",
    "outrider": "outrider.benchmarks.peers.outrider_peer:OutriderEngine",
    "transformers": "outrider.benchmarks.peers.transformers_peer:TransformersEngine",
    "vllm": "outrider.benchmarks.peers.vllm_peer:VllmEngine",
}


def serve(build: Callable[[Options], PeerEngine], requests: IO[str], replies: IO[str]) -> None:
    """Answer requests until the pipe closes; an exception ends the process with its traceback."""
    options = requests.readline()
    if not options:
        return
    engine = build(decode_options(options))
    _send(replies, encode(PeerInfo(engine.versions, engine.settings)))
    for line in requests:
        request = decode_request(line)
        _send(replies, encode(engine.generate(request.prompts, request.max_tokens, request.mode)))


def _send(replies: IO[str], line: str) -> None:
    replies.write(line + "\n")
    replies.flush()


def _builder(name: str) -> Callable[[Options], PeerEngine]:
    module, attribute = ENGINES.get(name, name).split(":")
    build: Callable[[Options], PeerEngine] = getattr(import_module(module), attribute)
    return build


def main() -> None:
    # Engines print to standard output: replies go to a duplicate of the pipe.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(_builder(sys.argv[1]), sys.stdin, replies)


if __name__ == "__main__":
    main()
