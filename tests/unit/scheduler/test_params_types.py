"""Every field of every wrong type is refused in one sentence that begins with its name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from outrider.errors import MAX_SHOWN_CHARS, RequestError
from outrider.scheduler.params import SamplingParams, check_priority

WRONG: tuple[Any, ...] = (
    True, 1, -1, 1.5, math.nan, math.inf, 10**5000, -(10**5000), "x", "",
    b"x", "\ud800", "x" * 10**6, [], {}, set(), [[]], [None], [True], [1.5], ["x"], [math.nan],
    [10**5000], {"x": 1}, {1: "x"}, {None: 1}, {1: math.nan}, {10**5000: 1.0}, {"1" * 5000: 1.0},
    object(), len, ...,
)  # fmt: skip


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(SamplingParams)])
def test_a_wrong_type_is_a_refusal_that_names_the_field(name: str) -> None:
    for number, value in enumerate((None, *WRONG)):
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            assert str(error).startswith(name), (number, str(error))
            assert len(str(error)) < MAX_SHOWN_CHARS + 200, (number, str(error))


def test_so_is_that_of_a_priority() -> None:
    for value in (None, *WRONG):
        if value not in (1, -1):
            with pytest.raises(RequestError, match="^priority is"):
                check_priority(value)
