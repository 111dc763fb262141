"""llama.cpp on a GGUF file, in its own environment: `--llama-python` names an interpreter that has
`xllamacpp`, `--llama-server` a program compiled for the machine, which is faster.

It computes with the file's weights and with activations rounded to 8 bits, so its texts may differ
from those of engines that compute in float32. With `ignore_eos` it bans the end-of-text token,
while the others generate it and continue.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from outrider.benchmarks.peers.llama_search import SettingsSearchResult, find_fastest
from outrider.benchmarks.peers.llama_servers import (
    LlamaServer,
    LlamaSettings,
    ask,
    program_version,
    start_server,
)
from outrider.benchmarks.peers.protocol import Generation, Mode, Options, Tokens

PLAIN = Mode()
SAMPLING = {
    "temperature": 0.0,
    "samplers": ["top_k"],
    "top_k": 1,
    "ignore_eos": True,
    "cache_prompt": False,
    "return_tokens": True,
}


class LlamaEngine:
    """A server for each mode, started at its first request; the others are idle."""

    def __init__(self, options: Options) -> None:
        self._options = options
        defaults = LlamaSettings(options.threads)
        start = partial(start_server, options, mode=PLAIN)
        self._found: SettingsSearchResult | None = None
        if options.search:
            self._found = find_fastest(defaults, start, _complete)
        self._chosen = defaults if self._found is None else self._found.settings
        self._servers: dict[Mode, LlamaServer] = {PLAIN: start(self._chosen)}

    @property
    def versions(self) -> dict[str, str]:
        if self._options.executable is not None:
            return {"llama-server": program_version(self._options.executable)}
        import xllamacpp

        return {"xllamacpp": xllamacpp.__version__, "uses": xllamacpp.get_system_info().strip()}

    @property
    def settings(self) -> dict[str, str]:
        chosen = {name: str(value) for name, value in dataclasses.asdict(self._chosen).items()}
        return chosen | {"search": "none" if self._found is None else self._found.describe()}

    def generate(self, prompts: Sequence[Tokens], max_tokens: int, mode: Mode) -> Generation:
        if mode not in self._servers:
            self._servers[mode] = start_server(self._options, self._chosen, mode)
        start = time.perf_counter()
        answers = _complete(self._servers[mode], prompts, max_tokens)
        seconds = time.perf_counter() - start
        token_ids = [list(answer["tokens"]) for answer in answers]
        drafted = sum(answer["timings"].get("draft_n", 0) for answer in answers)
        accepted = sum(answer["timings"].get("draft_n_accepted", 0) for answer in answers)
        return Generation(
            token_ids=token_ids,
            seconds=seconds,
            rounds=sum(map(len, token_ids)) - accepted,  # each commits one token of its own
            drafted=drafted,
            accepted=accepted,
        )


def _complete(
    server: LlamaServer, prompts: Sequence[Tokens], max_tokens: int
) -> list[dict[str, Any]]:
    """One answer per prompt, in order; `ValueError` if it computed another number of prompt
    tokens."""
    body = SAMPLING | {"prompt": list(prompts), "n_predict": max_tokens}
    answer = ask(server, "/completion", body)
    answers: list[dict[str, Any]] = answer if isinstance(answer, list) else [answer]
    answers.sort(key=lambda answer: int(answer["index"]))
    for prompt, of_prompt in zip(prompts, answers, strict=True):
        computed = of_prompt["timings"]["prompt_n"]
        if computed != len(prompt):
            raise ValueError(
                f"llama.cpp computed {computed} tokens of a prompt of {len(prompt)}; its figures "
                "would not be comparable."
            )
    return answers
