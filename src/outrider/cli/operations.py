"""Follows an operation of a server until it is done."""

from __future__ import annotations

import sys
import time

import typer

from outrider.cli.visible import visible_on
from outrider.client import Client, UnavailableError
from outrider.errors import OutriderError
from outrider.links.cluster_view import OperationView

POLL_S = 0.5
TIMEOUT_S = 900.0  # placement and start of a replica, with a margin

UNDER_WAY, FAILED = "under way", "failed"


class OperationError(OutriderError):
    """The operation failed."""


def follow(client: Client, timeout_s: float) -> None:
    """Wait for the operation just requested, printing its progress. Raises on failure or
    timeout."""
    deadline_s = time.monotonic() + timeout_s
    shown = ""
    while True:
        operation = _operation_of(client)
        if operation is not None:
            if operation.state == UNDER_WAY and operation.detail not in ("", shown):
                shown = operation.detail
                typer.echo(visible_on(sys.stdout, shown))
            elif operation.state == FAILED:
                raise OperationError(f"{operation.what}: {operation.detail}")
            elif operation.state != UNDER_WAY:
                typer.echo(visible_on(sys.stdout, f"done: {operation.what}"))
                return
        if time.monotonic() > deadline_s:
            raise OperationError(
                f"not done within {timeout_s:g} s, but still under way; `outrider status` shows "
                "its progress."
            )
        time.sleep(POLL_S)


def _operation_of(client: Client) -> OperationView | None:
    """The last operation; None while it is unknown."""
    try:
        cluster = client.status().cluster
    except UnavailableError:  # a gateway may be restarting
        return None
    return None if cluster is None else cluster.order
