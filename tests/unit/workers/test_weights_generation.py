"""Sampling defaults of a checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from outrider.checkpoints.resolve import BUNDLED_DRAFT, BUNDLED_TARGET
from outrider.workers.weights.generation import load_sampling_defaults, sampling_defaults


def test_the_authors_settings_go_by_our_names() -> None:
    config = {
        "do_sample": False,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": None,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
        "eos_token_id": [1, 2],
        "num_beams": 4,
    }
    assert sampling_defaults(config, "a file") == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_tokens": 2048,
    }


def test_values_that_cannot_be_are_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {"temperature": -1, "top_p": "high", "top_k": 5, "max_new_tokens": 0}
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults(config, "a file") == {"top_k": 5}
    (record,) = caplog.records
    assert record.getMessage() == (
        "a file has invalid values: temperature -1 and top_p 'high' and max_new_tokens 0; ignored"
    )


def test_a_checkpoint_without_the_file_sets_nothing(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 7}))
    assert load_sampling_defaults(tmp_path) == {"top_k": 7}


def test_the_bundled_target_samples_as_its_model_card_does() -> None:
    assert load_sampling_defaults(BUNDLED_TARGET) == {"temperature": 0.2, "top_p": 0.9}
    assert load_sampling_defaults(BUNDLED_DRAFT) == {}
