"""An order to a server, followed until it is carried out."""

from __future__ import annotations

import sys
import time

import typer

from outrider.cli.visible import visible_on
from outrider.client import Client, UnavailableError
from outrider.errors import OutriderError
from outrider.links.cluster_view import OrderView

POLL_S = 0.5
TIMEOUT_S = 900.0  # as long as a replica may take to be placed and started, and some

UNDER_WAY, FAILED = "under way", "failed"


class OrderError(OutriderError):
    """The server could not do what was wanted."""


def follow(client: Client, timeout_s: float) -> None:
    """Until the order that was just given is done, with a line for every step of it. Raises if it
    failed, or takes longer."""
    deadline_s = time.monotonic() + timeout_s
    told = ""
    while True:
        order = _order_of(client)
        if order is not None:
            if order.state == UNDER_WAY and order.detail not in ("", told):
                told = order.detail
                typer.echo(visible_on(sys.stdout, told))
            elif order.state == FAILED:
                raise OrderError(f"{order.what}: {order.detail}")
            elif order.state != UNDER_WAY:
                typer.echo(visible_on(sys.stdout, f"done: {order.what}"))
                return
        if time.monotonic() > deadline_s:
            raise OrderError(
                f"not done within {timeout_s:g} s, but still under way; `outrider status` shows "
                "how far it is."
            )
        time.sleep(POLL_S)


def _order_of(client: Client) -> OrderView | None:
    """None while nobody can tell."""
    try:
        cluster = client.status().cluster
    except UnavailableError:  # a gateway is started anew, maybe
        return None
    return None if cluster is None else cluster.order
