"""vLLM's arguments without a counterpart, and the page that lists them."""

import logging
import re
from pathlib import Path

import pytest

from outrider.config import EngineConfig, settings
from outrider.config.foreign import (
    COMMAND_IGNORED,
    COMMAND_PATHS,
    COMMAND_REFUSED,
    IGNORED,
    REFUSED,
)
from outrider.config.kwargs import PATHS
from outrider.errors import ConfigError

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "from-vllm.md").read_text()
# Those the issue of the first hour began with: code that people paste.
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


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


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


def test_the_page_tells_what_becomes_of_options_of_the_command() -> None:
    def told(answer: str) -> str:
        return answer.rstrip(".")

    expected = [[f"`--{n.replace('_', '-')}`", f"`{p}`"] for n, p in COMMAND_PATHS.items()]
    for names, head in ((COMMAND_IGNORED, "ignored"), (COMMAND_REFUSED, "refused")):
        expected += [
            [f"`--{name.replace('_', '-')}`", f"{head}: {told(reason)}"]
            for name, reason in names.items()
        ]
    assert rows("Options of the command") == expected


def test_what_options_of_the_command_stand_for_are_settings() -> None:
    assert set(COMMAND_PATHS.values()) <= set(settings())


def test_the_page_lists_what_is_ignored_and_why() -> None:
    assert rows("Ignored") == [[f"`{name}`", reason] for name, reason in IGNORED.items()]


def test_the_page_lists_what_is_refused_and_what_passes() -> None:
    expected = []
    for name, refused in REFUSED.items():
        passing = ", ".join(f"`{value!r}`" for value in refused.without_effect)
        expected.append([f"`{name}`", passing, refused.reason])
    assert rows("Refused") == expected


def test_the_page_tells_the_setting_of_every_accepted_argument() -> None:
    accepted = {name.strip("`"): path.strip("`") for name, path in rows("Accepted")}
    accepted.pop("speculative_config")
    assert {name: PATHS[name] for name in accepted} == accepted
    assert {"tokenizer", "tensor_parallel_size", "served_model_name"} <= set(accepted)


def test_names_in_the_reasons_are_settings_or_arguments() -> None:
    """A remedy that does not exist is worse than none."""
    known = {*PATHS, *PATHS.values()}
    reasons = [*IGNORED.values(), *(refused.reason for refused in REFUSED.values())]
    reasons += [*COMMAND_IGNORED.values(), *COMMAND_REFUSED.values()]
    named = {word for reason in reasons for word in re.findall(r"[a-z]+(?:[._][a-z]+)+", reason)}
    assert named - {"config.json"} <= known, named - known
