"""The secret shared by all processes of a server, read from the environment."""

from __future__ import annotations

import os

from outrider.errors import ConfigError

SECRET_VARIABLE = "OUTRIDER_SECRET"


def secret_from_environment() -> str:
    """Not a command-line argument: every user of the machine can see those."""
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        raise ConfigError(
            f"{SECRET_VARIABLE} is not set; set it to the same text for engine, ranks and gateways."
        )
    return secret
