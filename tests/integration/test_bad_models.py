"""Models that do not fit, are damaged, or find too little memory: one sentence and no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_model, random_prompt
from process_tools import pids_of
from same_text import acceptance_rate, contents

from outrider import LLM, SamplingParams
from outrider.errors import CapacityError, ConfigError, ModelError, OutriderError, RequestError

pytestmark = pytest.mark.model

UNPADDED, PADDED = 320, 384
SPECULATED = SamplingParams(temperature=0.7, seed=2, max_tokens=24)
PLAIN = SamplingParams(temperature=0.7, seed=2, max_tokens=24, speculation="off")
PROMPTS = [random_prompt(length) for length in (3, 20)]


def refusal(kind: type[OutriderError], model: Path | str, **options: Any) -> str:
    """The message with which `LLM` refuses; it must be one short line."""
    with pytest.raises(kind) as caught:
        LLM(str(model), **options)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message and len(message) < 400
    return message


@pytest.fixture
def copied(pair: Any, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the pair's target or draft, to be spoilt."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(getattr(pair, name), tmp_path / name))

    return copy


def save_padded(model: Any, folder: Path, tokenizer: Any) -> Path:
    """The same model with rows for ids that its tokenizer does not have."""
    torch.manual_seed(1)
    padded = random_model(
        "llama", vocab_size=PADDED, num_hidden_layers=model.config.num_hidden_layers
    )
    weights = padded.state_dict()
    for name, value in model.state_dict().items():
        weights[name][: value.shape[0]].copy_(value)
    padded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# -- draft and target ---------------------------------------------------------------------------


def change_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "tokenizer.json"
    contents = json.loads(path.read_text())
    change(contents)
    path.write_text(json.dumps(contents))


def test_a_draft_that_means_other_tokens_is_refused(
    pair: Any, copied: Callable[[str], Path]
) -> None:
    def swap(tokenizer: dict[str, Any]) -> None:
        ids = tokenizer["model"]["vocab"]
        ids["x"], ids["y"] = ids["y"], ids["x"]

    draft = copied("draft")
    change_tokenizer(draft, swap)
    message = refusal(ModelError, pair.target, draft_model=str(draft))
    assert "'x'" in message or "'y'" in message
    assert "same family" in message


def test_a_draft_that_splits_text_otherwise_is_refused(
    pair: Any, copied: Callable[[str], Path]
) -> None:
    draft = copied("draft")
    change_tokenizer(draft, lambda tokenizer: tokenizer["model"].update(merges=[]))
    assert "splits" in refusal(ModelError, pair.target, draft_model=str(draft))


def test_a_draft_too_small_for_the_tokenizer_is_refused(
    pair: Any, tmp_path: Path, tokenizer: Any
) -> None:
    random_model("llama", vocab_size=200).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    message = refusal(ModelError, pair.target, draft_model=str(tmp_path))
    assert "200" in message and "319" in message


def test_without_tokenizers_vocabularies_must_be_of_one_size(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path / "target")
    random_model("llama", vocab_size=PADDED).save_pretrained(tmp_path / "draft")
    message = refusal(ModelError, tmp_path / "target", draft_model=str(tmp_path / "draft"))
    assert "320" in message and "384" in message


@pytest.mark.parametrize("padded", ("target", "draft"))
def test_padded_vocabularies_of_one_tokenizer_write_the_same_text(
    padded: str, pair: Any, tmp_path: Path, tokenizer: Any
) -> None:
    folders = {"target": pair.target, "draft": pair.draft}
    loaded = type(pair.reference).from_pretrained(folders[padded], dtype=torch.float32)
    folders[padded] = save_padded(loaded, tmp_path, tokenizer)
    llm = LLM(
        str(folders["target"]),
        draft_model=str(folders["draft"]),
        speculation_policy="fixed",
        kv_cache_gb=0.01,
        deterministic=True,
    )
    outputs = llm.generate(PROMPTS, SPECULATED, use_tqdm=False)
    assert contents(outputs) == contents(llm.generate(PROMPTS, PLAIN, use_tqdm=False))
    assert acceptance_rate(outputs) > 0
    ids = {token for output in outputs for token in output.outputs[0].token_ids}
    assert (max(ids) >= UNPADDED) == (padded == "target")


# Ids of the target's padding, which the draft has not: alone, and beside some that it has.
BEYOND: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": [330, 350, 383]},
    "some allowed": {"allowed_token_ids": [5, 9, 350], "top_k": 2},
    "biased": {"logit_bias": {350: 30.0, 7: 2.0}, "top_p": 0.9},
    "penalised": {"logit_bias": {330: 30.0, 350: 30.0}, "frequency_penalty": 2.0},
    "not yet": {"stop_token_ids": [350], "logit_bias": {350: 30.0}, "min_tokens": 4},
    "not yet allowed": {"stop_token_ids": [5], "allowed_token_ids": [5, 350], "min_tokens": 4},
}


@pytest.mark.parametrize("workers", ("inline", "processes"))
def test_ids_that_only_the_target_has_cost_the_draft_its_guesses_and_nothing_more(
    workers: str, pair: Any, tmp_path: Path, tokenizer: Any
) -> None:
    target = save_padded(pair.reference, tmp_path, tokenizer)
    options: dict[str, Any] = {"kv_cache_gb": 0.01, "deterministic": True, "log_level": "error"}
    llm = LLM(
        str(target),
        draft_model=str(pair.draft),
        speculation_policy="fixed",
        workers=workers,
        num_threads=1,
        **options,
    )
    asked: list[dict[str, Any]] = [
        {"temperature": t, **own} for own in BEYOND.values() for t in (0.0, 0.8)
    ]
    prompts = [random_prompt(6, seed=i) for i in range(len(asked))]
    drafts = pids_of(llm, "draft") if workers == "processes" else []
    try:
        texts = [
            contents(
                llm.generate(
                    prompts,
                    [
                        SamplingParams(seed=3, max_tokens=8, speculation=how, **each)
                        for each in asked
                    ],
                    use_tqdm=False,
                )
            )
            for how in ("off", None)
        ]
        assert texts[0] == texts[1]
        assert drafts == (pids_of(llm, "draft") if workers == "processes" else [])
        after = llm.generate(PROMPTS, SPECULATED, use_tqdm=False)
        assert acceptance_rate(after) > 0, "the draft goes on drafting for others"
    finally:
        llm.close()


def test_rejection_sampling_takes_padded_vocabularies(
    pair: Any, tmp_path: Path, tokenizer: Any
) -> None:
    target = save_padded(pair.reference, tmp_path, tokenizer)
    llm = LLM(
        str(target),
        draft_model=str(pair.draft),
        speculation_policy="fixed",
        kv_cache_gb=0.01,
        verification="rejection",
    )
    outputs = llm.generate(PROMPTS, SPECULATED, use_tqdm=False)
    assert all(output.finished for output in outputs)
    assert acceptance_rate(outputs) > 0


# -- files --------------------------------------------------------------------------------------


def test_a_model_that_is_nowhere_is_named() -> None:
    assert "no-such-folder" in refusal(ModelError, "./no-such-folder/at/all")


def test_a_folder_without_a_configuration_says_so(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal(ModelError, tmp_path)


def test_a_folder_without_weights_says_so(copied: Callable[[str], Path]) -> None:
    folder = copied("target")
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(ModelError, folder)


@pytest.mark.parametrize("size", (0, 5, 5000), ids=("empty", "no header", "cut off"))
def test_damaged_weights_are_named(size: int, copied: Callable[[str], Path]) -> None:
    weights = copied("target") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    message = refusal(ModelError, weights.parent)
    assert str(weights) in message and "damaged" in message


def test_weights_of_another_shape_are_named(copied: Callable[[str], Path]) -> None:
    folder = copied("target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    assert "[64, 100]" in refusal(ModelError, folder)


def test_a_damaged_draft_is_named_as_well(pair: Any, copied: Callable[[str], Path]) -> None:
    weights = copied("draft") / "model.safetensors"
    weights.write_bytes(b"nothing of the kind")
    assert str(weights) in refusal(ModelError, pair.target, draft_model=str(weights.parent))


def test_a_damaged_configuration_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("target")
    (folder / "config.json").write_text("{")
    assert "config.json" in refusal(ModelError, folder)


def test_a_damaged_gguf_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    assert "model.gguf" in refusal(ModelError, path)


def test_an_unknown_architecture_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("target")
    config = json.loads((folder / "config.json").read_text())
    changed = config | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(changed))
    assert "amba" in refusal(ModelError, folder)


# -- memory and lengths -------------------------------------------------------------------------


def test_too_little_kv_memory_for_one_request_says_how_much_is_enough(pair: Any) -> None:
    message = refusal(CapacityError, pair.target, kv_cache_gb=1e-4, max_model_len=1000)
    enough = float(message.rpartition("at least ")[2].split()[0])
    LLM(str(pair.target), kv_cache_gb=enough * 1.01, max_model_len=1000)


def test_no_kv_memory_at_all_is_refused(pair: Any) -> None:
    assert "kv_cache_gb" in refusal(CapacityError, pair.target, kv_cache_gb=1e-9)


def test_a_request_too_large_for_the_pool_is_refused_and_others_still_run(
    pair: Any, kv_gb: Callable[..., float]
) -> None:
    llm = LLM(str(pair.target), kv_cache_gb=kv_gb(64, pair.target, block_size=16))
    with pytest.raises(RequestError, match="max_model_len"):
        llm.generate([random_prompt(100)], PLAIN)
    assert llm.generate([random_prompt(30)], PLAIN)[0].finished


def test_a_length_beyond_the_models_positions_is_refused(pair: Any) -> None:
    assert "1024" in refusal(ConfigError, pair.target, max_model_len=2000)
