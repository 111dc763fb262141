"""What processes on other hosts are told about where models come from."""

from __future__ import annotations

import pytest

from outrider.checkpoints.environment import model_environment
from outrider.engine.launch.child import environment_without_settings

_GIVEN = {
    "HF_TOKEN": "secret",
    "HF_HOME": "/models",
    "HF_HUB_CACHE": "/models/hub",
    "HF_HUB_OFFLINE": "1",
    "HF_ENDPOINT": "http://mirror",
    "OUTRIDER_CACHE": "/cache",
}


@pytest.mark.parametrize("missing", [None, *_GIVEN])
def test_variables_about_models_are_handed_on_if_they_are_set(
    monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    for name, value in _GIVEN.items():
        monkeypatch.setenv(name, value)
    if missing is not None:
        monkeypatch.delenv(missing)
    assert model_environment() == {n: v for n, v in _GIVEN.items() if n != missing}


def test_a_child_on_this_host_inherits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _GIVEN.items():
        monkeypatch.setenv(name, value)
    assert environment_without_settings().items() >= _GIVEN.items()
