"""Hugging Face `transformers`: plain, assisted and prompt-lookup generation."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from outrider.benchmarks.peers.protocol import Generation, Mode, Options, Tokens

PROMPT_LOOKUP_TOKENS = 10  # the number its documentation uses


class TransformersEngine:
    """One prompt at a time: batches need padding, which assisted generation refuses."""

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        transformers.utils.logging.set_verbosity_error()
        self._target = _load(options.target)
        self._draft = _load(options.draft)
        self._draft_defaults = copy.deepcopy(self._draft.generation_config)
        self._rows_per_pass: list[int] = []
        self._target.register_forward_pre_hook(self._note_pass, with_kwargs=True)

    @property
    def versions(self) -> dict[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    @property
    def settings(self) -> dict[str, str]:
        return {"attention": self._target.config._attn_implementation}

    def generate(self, prompts: Sequence[Tokens], max_tokens: int, mode: Mode) -> Generation:
        self._rows_per_pass.clear()
        speculation = self._speculation(mode)
        token_ids: list[Tokens] = []
        start = time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                text = self._target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=max_tokens,
                    **speculation,
                )
            token_ids.append(text[0, len(prompt) :].tolist())
        seconds = time.perf_counter() - start
        rounds = len(self._rows_per_pass)
        # Each pass has one row that is no draft token; a first pass also has its prompt.
        known = rounds + sum(len(prompt) - 1 for prompt in prompts)
        return Generation(
            token_ids=token_ids,
            seconds=seconds,
            rounds=rounds,
            drafted=sum(self._rows_per_pass) - known,
            accepted=sum(map(len, token_ids)) - rounds,
        )

    def _speculation(self, mode: Mode) -> dict[str, Any]:
        if mode.method == "draft":
            # Generation adapts the assistant's settings; every call starts from the defaults.
            config = copy.deepcopy(self._draft_defaults)
            if mode.depth is not None:
                config.num_assistant_tokens = mode.depth
                config.num_assistant_tokens_schedule = "constant"
                config.assistant_confidence_threshold = 0.0
            self._draft.generation_config = config
            return {"assistant_model": self._draft}
        if mode.method == "ngram":
            return {"prompt_lookup_num_tokens": mode.depth or PROMPT_LOOKUP_TOKENS}
        return {}

    def _note_pass(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self._rows_per_pass.append(ids.shape[1])


def _load(folder: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    # Without end-of-text ids generation runs to its limit; min_length would ban the token.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
