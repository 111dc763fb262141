"""Ports that nobody listens on."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One that is free now; somebody else may take it before it is used."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port
