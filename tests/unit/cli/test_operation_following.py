"""`outrider scale` and `outrider rollout` tell how far an order is, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cli import operations
from outrider.cli.operations import OperationError, follow
from outrider.client import UnavailableError
from outrider.links.cluster_view import OperationView


class FakeClient:
    """Tells of an order, a moment after the other; None is a gateway that is away."""

    def __init__(self, *moments: OperationView | None) -> None:
        self._moments: Iterator[OperationView | None] = iter(moments)

    def status(self) -> Any:
        order = next(self._moments)
        if order is None:
            raise UnavailableError("the server cannot be reached.")
        return SimpleNamespace(cluster=SimpleNamespace(order=order))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "POLL_S", 0.0)


def _view(state: str, detail: str = "") -> OperationView:
    return OperationView("scale to 3 replicas", state, detail)


def test_each_step_is_told_once_and_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [_view("under way", each) for each in ("", "replica 2 serves", "replica 2 serves")]
    client: Any = FakeClient(*steps, None, _view("done"))
    follow(client, 10.0)
    assert capsys.readouterr().out == "replica 2 serves\ndone: scale to 3 replicas\n"


def test_a_failed_order_is_an_error_with_its_reason() -> None:
    client: Any = FakeClient(_view("under way"), _view("failed", "there is no room."))
    with pytest.raises(OperationError, match=r"^scale to 3 replicas: there is no room\.$"):
        follow(client, 10.0)


def test_an_order_that_takes_too_long_is_left_to_the_server() -> None:
    client: Any = FakeClient(_view("under way"), _view("under way"))
    with pytest.raises(OperationError, match="not done within 0 s, but still under way"):
        follow(client, 0.0)
