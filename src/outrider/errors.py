"""Everything Outrider raises on purpose.

A message names the field, the value and the remedy in one sentence, so that a command can print
it as it is. `exit_code` is what the command line leaves with.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of all errors a user can cause or must hear about."""

    exit_code = 1


class ConfigError(OutriderError):
    """A configuration value, flag, environment variable or file is wrong."""

    exit_code = 2


class RequestError(OutriderError):
    """A request cannot be served as it is: bad parameter, empty or over-long prompt."""

    exit_code = 2


class ModelError(OutriderError):
    """A checkpoint is missing, damaged, of an unknown kind, or does not fit its partner."""


class CapacityError(OutriderError):
    """There is too little memory for what was asked."""


class EngineDeadError(OutriderError):
    """The step loop has stopped; nothing more will be generated."""
