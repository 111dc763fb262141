"""Records which tokens of real texts a draft predicts: the bundled pair over Spec-Bench.

A draft token counts only while it and all before it are the target's, and then the draft has read
the target's text. So one prediction per token tells how any round over that text ends.
"""

from __future__ import annotations

import json
from math import exp
from pathlib import Path

from outrider import LLM, SamplingParams
from outrider.benchmarks.prompts import encode_question, read_questions, select_questions
from outrider.checkpoints.resolve import BUNDLED_DRAFT, BUNDLED_TARGET, draft_assets
from outrider.text.tokenizer import load_tokenizer

_CONTEXT = 2048


def record_texts(per_group: int, num_tokens: int, out: Path) -> int:
    """Write a line for each text: its prompt's length, and a digit per token for whether the draft
    predicts it and for its confidence in tenths. Returns the number of texts."""
    target = LLM(BUNDLED_TARGET, draft_model="none", max_model_len=_CONTEXT, log_level="error")
    tokenizer = load_tokenizer(draft_assets())
    questions = select_questions(read_questions(), per_group)
    encoded = (encode_question(question, tokenizer) for question in questions)
    prompts = [ids for ids in encoded if len(ids) + num_tokens < _CONTEXT]
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    texts = [
        list(prompt) + list(output.outputs[0].token_ids)
        for prompt, output in zip(prompts, target.generate(prompts, greedy), strict=True)
    ]
    draft = LLM(BUNDLED_DRAFT, draft_model="none", max_model_len=_CONTEXT, log_level="error")
    read = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with out.open("w", encoding="utf-8") as file:
        for prompt, text, found in zip(prompts, texts, draft.generate(texts, read), strict=True):
            hits = confidences = ""
            assert found.prompt_logprobs is not None
            for token, tops in zip(
                text[len(prompt) :], found.prompt_logprobs[len(prompt) :], strict=True
            ):
                assert tops is not None
                likeliest, logprob = max(tops.items(), key=lambda each: each[1].logprob)
                hits += str(int(likeliest == token))
                confidences += str(min(int(10 * exp(logprob.logprob)), 9))
            line = {"prompt": len(prompt), "hits": hits, "confidences": confidences}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    return len(texts)
