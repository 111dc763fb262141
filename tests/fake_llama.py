#!/usr/bin/env python
"""Stands in for `llama-server` and for the package `xllamacpp`: the requests of llama.cpp's server
that the benchmark sends, answered without a model.

A text counts on from the last token of its prompt. Answers come in reverse order, each with its
index; a prompt that begins with `CACHED` is said to have been found in a cache but for one token.
As a program it writes its process id and its arguments to the file that `FAKE_LLAMA_LOG` names.
"""

from __future__ import annotations

import enum
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CACHED, ACCEPTED_OF = 99, (2, 3)


class Handler(BaseHTTPRequestHandler):
    drafts = False

    def do_GET(self) -> None:
        self._answer({"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["ignore_eos"] and not body["cache_prompt"] and body["temperature"] == 0.0
        prompts = list(enumerate(body["prompt"]))
        answers = [self._completion(i, ids, body["n_predict"]) for i, ids in reversed(prompts)]
        self._answer(answers[0] if len(answers) == 1 else answers)

    def _completion(self, index: int, prompt: list[int], count: int) -> dict[str, Any]:
        timings = {"prompt_n": 1 if prompt[0] == CACHED else len(prompt)}
        if self.drafts:
            timings |= {"draft_n_accepted": ACCEPTED_OF[0], "draft_n": ACCEPTED_OF[1]}
        tokens = [prompt[-1] + 1 + i for i in range(count)]
        return {"index": index, "tokens": tokens, "timings": timings}

    def _answer(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def listen(port: int, *, drafts: bool) -> ThreadingHTTPServer:
    handler = type("DraftingHandler", (Handler,), {"drafts": drafts})
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


# The package, as far as it is used.

__version__ = "1.2.3"


class _Record:
    """Takes any attribute, as the package's records of parameters take theirs."""

    def __getattr__(self, name: str) -> Any:
        value = _Record()
        setattr(self, name, value)
        return value


CommonParams = _Record
llama_flash_attn_type = enum.IntEnum(
    "llama_flash_attn_type",
    {"LLAMA_FLASH_ATTN_TYPE_DISABLED": 0, "LLAMA_FLASH_ATTN_TYPE_ENABLED": 1},
)
ggml_type = enum.IntEnum("ggml_type", {"GGML_TYPE_F32": 0, "GGML_TYPE_F16": 1})
llama_load_mode = enum.IntEnum(
    "llama_load_mode", {"LLAMA_LOAD_MODE_NONE": 0, "LLAMA_LOAD_MODE_MMAP": 1}
)
common_speculative_type = enum.IntEnum(
    "common_speculative_type", {"COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE": 1}
)


def get_system_info() -> str:
    return "CPU : NEON = 1 | "


class Server:
    def __init__(self, params: Any) -> None:
        assert not params.cache_prompt and params.cache_ram_mib == 0
        assert params.n_ctx == params.n_parallel * 64 and params.cpuparams.n_threads == 2
        drafts = params.speculative.types == [1] and params.speculative.draft.n_max == 2
        http = listen(params.port, drafts=drafts)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{http.server_address[1]}"


def main() -> None:
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print("version: fake\nbuilt for tests", file=sys.stderr)
        return
    with open(os.environ["FAKE_LLAMA_LOG"], "a", encoding="utf-8") as log:
        log.write(json.dumps([os.getpid(), *arguments]) + "\n")
    if "missing.gguf" in arguments:
        sys.exit("failed to load model")
    port = int(arguments[arguments.index("--port") + 1])
    listen(port, drafts="--spec-type" in arguments).serve_forever()


if __name__ == "__main__":
    main()
