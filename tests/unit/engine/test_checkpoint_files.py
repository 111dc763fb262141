"""What an engine takes from the small files beside the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import save_checkpoint

from outrider import LLM
from outrider.checkpoints.resolve import draft_assets
from outrider.config import EngineConfig
from outrider.engine.preflight import check_models
from outrider.errors import ModelError


@pytest.mark.model
def test_an_engine_knows_the_sampling_defaults_and_endings_of_its_target(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    settings = {"temperature": 0.6, "top_k": 20, "eos_token_id": [7, 9]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    facts = LLM(str(tmp_path), max_model_len=64).engine.built.facts
    assert facts.sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert facts.eos_ids == (7, 9)


def test_a_tokenizer_larger_than_the_model_is_refused_before_weights_are_read(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(draft_assets() / name, tmp_path)
    with pytest.raises(ModelError, match=r"the tokenizer has ids up to 49151 but the model's voc"):
        check_models(EngineConfig.from_kwargs(model=str(tmp_path)))
