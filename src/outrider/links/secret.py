"""The secret every process of a server shares, as processes started by hand are given it."""

from __future__ import annotations

import os

from outrider.errors import ConfigError

SECRET_VARIABLE = "OUTRIDER_SECRET"


def secret_from_environment() -> str:
    """Not an argument: those are there for every user of the machine to see."""
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        raise ConfigError(
            f"{SECRET_VARIABLE} is not set; set it to the same text for engine, ranks and gateways."
        )
    return secret
