"""vLLM, in its own environment: `--vllm-python` names the interpreter that has it.

The engine runs inside this process: on two cores a second process takes time from the model.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.benchmarks.peers.protocol import Generation, Mode, Options, Tokens

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
MAX_NUM_SEQS = 8
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


class VllmEngine:
    """Speculation is fixed when vLLM starts, so `options.mode` holds for every request."""

    def __init__(self, options: Options) -> None:
        os.environ.update(SETTINGS)  # read when vLLM is imported
        from vllm import LLM

        self._mode = options.mode
        self._llm = LLM(
            model=options.target,
            tokenizer=options.tokenizer,
            dtype="float32",
            max_model_len=options.max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            enable_prefix_caching=False,
            disable_log_stats=False,  # acceptance is only counted where statistics are kept
            speculative_config=_speculative_config(options),
            hf_overrides=_missing_architecture(Path(options.target)),
        )

    @property
    def versions(self) -> dict[str, str]:
        import torch
        import vllm

        return {"vllm": vllm.__version__, "torch": torch.__version__}

    @property
    def settings(self) -> dict[str, str]:
        return dict(SETTINGS)

    def generate(self, prompts: Sequence[Tokens], max_tokens: int, mode: Mode) -> Generation:
        from vllm import SamplingParams

        if mode != self._mode:
            raise ValueError(f"vLLM was started with {self._mode} and cannot change to {mode}.")
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        before = self._counts()
        start = time.perf_counter()
        results = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        seconds = time.perf_counter() - start
        after = self._counts()
        token_ids = [list(result.outputs[0].token_ids) for result in results]
        accepted = after[ACCEPTED] - before[ACCEPTED]
        return Generation(
            token_ids=token_ids,
            seconds=seconds,
            # A round commits one target token. vLLM also counts drafts accepted past the limit,
            # so this is low by up to one depth a prompt.
            rounds=sum(map(len, token_ids)) - accepted,
            drafted=after[DRAFTED] - before[DRAFTED],
            accepted=accepted,
        )

    def _counts(self) -> dict[str, int]:
        counts = {DRAFTED: 0, ACCEPTED: 0}
        for metric in self._llm.get_metrics():
            if metric.name in counts:
                counts[metric.name] += int(metric.value)
        return counts


def _speculative_config(options: Options) -> dict[str, Any] | None:
    if options.mode.method == "off":
        return None
    if options.mode.depth is None:
        raise ValueError("vLLM needs a depth; name one.")
    if options.mode.method == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": options.mode.depth,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    return {
        "method": "draft_model",
        "model": options.draft,
        "num_speculative_tokens": options.mode.depth,
    }


def _missing_architecture(target: Path) -> dict[str, Any]:
    """vLLM picks the model class by a name that a converted checkpoint may lack."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    if config.get("architectures"):
        return {}
    return {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]}
