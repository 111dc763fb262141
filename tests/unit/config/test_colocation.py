"""When an engine holds the models itself, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import EngineConfig
from outrider.config.colocation import settle_colocation
from outrider.engine.over_ranks import group_sizes
from outrider.errors import ConfigError


def _config(**options: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(**({"model": "big", "draft_model": "small"} | options))


@pytest.mark.parametrize(
    ("options", "num_gpus", "colocate"),
    [
        ({}, 1, True),
        ({"draft_model": None}, 1, True),
        ({"device": "cuda:0", "draft_device": "cuda:0"}, 1, True),
        ({}, 0, False),
        ({}, 2, False),
        ({"device": "cpu"}, 1, False),
        ({"draft_device": "cpu"}, 1, False),
        ({"draft_dtype": "float32"}, 1, False),
        ({"tensor_parallel_size": 2}, 1, False),
        ({"draft_tensor_parallel_size": 2}, 1, False),
        ({"workers": "processes"}, 1, False),
        ({"colocate": False}, 1, False),
        ({"colocate": True}, 0, True),
        ({"colocate": True, "device": "cpu"}, 8, True),
    ],
)
def test_the_only_gpu_is_shared_by_one_process_unless_told(
    options: dict[str, Any], num_gpus: int, colocate: bool
) -> None:
    assert settle_colocation(_config(**options), num_gpus).cluster.colocate is colocate


def test_an_engine_that_holds_the_models_has_no_ranks() -> None:
    assert group_sizes(_config()) == {"target": 1, "draft": 1}
    assert group_sizes(_config(colocate=True)) == {}


@pytest.mark.parametrize(
    ("options", "name", "value", "wanted"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", 2, 1),
        ({"draft_tensor_parallel_size": 4}, "draft_tensor_parallel_size", 4, 1),
        ({"device": "cuda", "draft_device": "cpu"}, "draft_device", "cpu", "cuda"),
        ({"workers": "processes"}, "workers", "processes", "inline"),
    ],
)
def test_what_one_process_cannot_hold_is_refused(
    options: dict[str, Any], name: str, value: object, wanted: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        _config(colocate=True, **options)
    assert str(caught.value) == (
        f"{name} is {value!r} but cluster.colocate is true, which takes {wanted!r}; set it to "
        "that, or cluster.colocate to false."
    )
