"""The process of one engine: `python -m outrider.bench.peers.worker ENGINE`, spoken to by pipe.

ENGINE is a name below or `module:Class` of another implementation of `protocol.Engine`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import IO

from outrider.bench.peers.protocol import (
    Engine,
    Hello,
    Options,
    decode_options,
    decode_request,
    encode,
)

ENGINES: Mapping[str, str] = {
    "llama.cpp": "outrider.bench.peers.llama_peer:LlamaEngine",
    "outrider": "outrider.bench.peers.outrider_peer:OutriderEngine",
    "transformers": "outrider.bench.peers.transformers_peer:TransformersEngine",
    "vllm": "outrider.bench.peers.vllm_peer:VllmEngine",
}


def serve(build: Callable[[Options], Engine], requests: IO[str], replies: IO[str]) -> None:
    """Answer requests until the other side closes; an exception ends the process with its trace."""
    options = requests.readline()
    if not options:
        return
    engine = build(decode_options(options))
    _send(replies, encode(Hello(engine.versions, engine.settings)))
    for line in requests:
        request = decode_request(line)
        _send(replies, encode(engine.generate(request.prompts, request.max_tokens, request.mode)))


def _send(replies: IO[str], line: str) -> None:
    replies.write(line + "\n")
    replies.flush()


def _builder(name: str) -> Callable[[Options], Engine]:
    module, attribute = ENGINES.get(name, name).split(":")
    build: Callable[[Options], Engine] = getattr(import_module(module), attribute)
    return build


def main() -> None:
    # Engines print to standard output; replies keep the pipe for themselves.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(_builder(sys.argv[1]), sys.stdin, replies)


if __name__ == "__main__":
    main()
