"""Orders that cannot be read are refused in a sentence before a controller hears of them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from outrider.errors import RequestError
from outrider.gateway.fleet_control import StandaloneFleet
from outrider.gateway.grpc.control import ControlServicer
from outrider.proto import control_pb2


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"draft.model": ' + "[" * 100_000])
def test_settings_that_are_no_json_object_are_refused(text: str) -> None:
    unused = cast(Any, None)
    servicer = ControlServicer(unused, unused, StandaloneFleet(unused))
    request = control_pb2.RollOutRequest(settings_json=text)
    with pytest.raises(RequestError, match=r"^settings_json (cannot be read|is no object)"):
        asyncio.run(servicer.RollOut(request, None))
