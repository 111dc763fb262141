"""vLLM's arguments without a counterpart, and the page that lists them."""

import logging
import re

import pytest
from vllm_page import PAGE, accepted, tables, written_tables

from outrider.config import EngineConfig, settings
from outrider.config.foreign import IGNORED, REFUSED
from outrider.config.foreign_command import COMMAND_IGNORED, COMMAND_PATHS, COMMAND_REFUSED
from outrider.config.foreign_speculation import (
    SPECULATIVE_IGNORED,
    SPECULATIVE_METHODS,
    SPECULATIVE_PATHS,
    SPECULATIVE_REFUSED,
)
from outrider.config.kwargs import PATHS
from outrider.errors import ConfigError

# Code that people paste.
PASTED = {
    "swap_space": 4,
    "disable_log_stats": True,
    "enable_chunked_prefill": True,
    "tokenizer_mode": "auto",
    "download_dir": "/models",
    "load_format": "auto",
    "distributed_executor_backend": "ray",
    "enforce_eager": True,
    "trust_remote_code": True,
}
_OF_REQUESTS_AND_ANSWERS = {
    *("chat_template_kwargs", "return_tokens_as_token_ids", "stream_options.include_usage"),
    *("speculation_stats", "system_fingerprint"),
}


def test_arguments_without_counterpart_give_one_warning_and_change_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        assert EngineConfig.from_kwargs(**PASTED) == EngineConfig()
    [record] = caplog.records
    assert all(name in record.getMessage() for name in PASTED)


def test_one_that_was_not_given_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        EngineConfig.from_kwargs(**dict.fromkeys(IGNORED))
    assert not caplog.records


def test_pipeline_parallelism_is_refused_in_its_own_words() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(pipeline_parallel_size=2)
    assert str(caught.value) == (
        "pipeline_parallel_size is 2; layers are not spread over devices; "
        "tensor_parallel_size splits each of them instead."
    )


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_argument_passes_when_it_asks_for_nothing(name: str) -> None:
    for value in (None, *REFUSED[name].without_effect):
        assert EngineConfig.from_kwargs(**{name: value}) == EngineConfig()
    with pytest.raises(ConfigError, match=f"^{name} is 'else'; "):
        EngineConfig.from_kwargs(**{name: "else"})


def test_no_name_is_answered_in_two_ways() -> None:
    assert not (set(PATHS) & set(IGNORED)) | (set(PATHS) & set(REFUSED))
    assert not set(IGNORED) & set(REFUSED)
    of_command = [*COMMAND_PATHS, *COMMAND_IGNORED, *COMMAND_REFUSED]
    assert len(of_command) == len(set(of_command))
    assert set(of_command) & {*PATHS, *IGNORED, *REFUSED} == {"data_parallel_size"}


def test_what_options_of_the_command_stand_for_are_settings() -> None:
    assert set(COMMAND_PATHS.values()) <= set(settings())


def test_the_page_is_what_is_made_of_the_tables() -> None:
    """Of the lines of `vllm serve` too; `make docs-vllm` writes it anew."""
    written = written_tables(PAGE.read_text())
    for name, made in tables().items():
        assert written[name] == made, f"{name}: run make docs-vllm"


def test_what_is_accepted_are_settings() -> None:
    assert {"tokenizer", "tensor_parallel_size", "served_model_name"} <= set(accepted())
    assert {*accepted().values(), *SPECULATIVE_PATHS.values()} <= set(settings())


def test_all_that_is_refused_is_refused_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(enable_lora=True, kv_cache_dtype="fp8", swap_space=4)
    assert str(caught.value).splitlines() == [
        "enable_lora is True; LoRA adapters are not there yet; merge one into the weights.",
        "kv_cache_dtype is 'fp8'; KV has the target's dtype; leave it out.",
    ]


@pytest.mark.parametrize("method", SPECULATIVE_METHODS)
def test_methods_of_vllms_are_taken(method: str) -> None:
    config = {"method": method, "model": "draft", "num_speculative_tokens": 3}
    made = EngineConfig.from_kwargs(model="big", speculative_config=config)
    assert made.speculation.method == {"draft_model": "draft"}.get(method, method)
    assert made.speculation.num_speculative_tokens == 3 and made.draft.model == "draft"


@pytest.mark.parametrize(
    "method", ["eagle", "mtp", "deepseek_mtp", "suffix", "dflash", "ngram_gpu"]
)
def test_other_methods_are_refused_by_their_names(method: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(speculative_config={"method": method})
    assert str(caught.value).startswith(f"speculative_config['method'] is {method!r}; ")
    assert str(caught.value).endswith(
        "; choose ngram, draft_model, eagle3, medusa or mlp_speculator."
    )


def test_keys_that_change_no_text_are_ignored_and_others_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = {"method": "ngram", "disable_by_batch_size": 4, "rejection_sample_method": "standard"}
    with caplog.at_level(logging.WARNING, "outrider"):
        made = EngineConfig.from_kwargs(speculative_config=asked)
    assert made.speculation.method == "ngram"
    assert "speculative_config['disable_by_batch_size']" in caplog.text
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(
            speculative_config={"rejection_sample_method": "synthetic", "parallel_drafting": True}
        )
    assert len(str(caught.value).splitlines()) == 2


def test_no_key_of_speculative_config_is_answered_in_two_ways() -> None:
    of_it = [*SPECULATIVE_PATHS, *SPECULATIVE_IGNORED, *SPECULATIVE_REFUSED]
    assert len(of_it) == len(set(of_it))


def test_names_in_the_reasons_are_settings_or_arguments() -> None:
    """A remedy that does not exist is worse than none."""
    known = {*PATHS, *PATHS.values()}
    reasons = [*IGNORED.values(), *(refused.reason for refused in REFUSED.values())]
    reasons += [*COMMAND_IGNORED.values(), *(each.reason for each in COMMAND_REFUSED.values())]
    reasons += [*SPECULATIVE_IGNORED.values()]
    reasons += [refused.reason for refused in SPECULATIVE_REFUSED.values()]
    named = {word for reason in reasons for word in re.findall(r"[a-z]+(?:[._][a-z]+)+", reason)}
    others = {"config.json", "draft_tensor_parallel_size"}
    others |= _OF_REQUESTS_AND_ANSWERS
    assert named - others <= known, named - known
