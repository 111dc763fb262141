"""Chooses the target of an address."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from outrider.errors import ConfigError
from outrider.loadtest.targets.base import Target, TargetSpec
from outrider.requirements import not_installed

IN_PROCESS = "inprocess"
GRPC_SCHEMES = ("grpc", "grpcs")
HTTP_SCHEMES = ("http", "https")
_FORMS = "grpc://HOST:PORT, grpcs://HOST:PORT, http(s)://HOST[:PORT][/v1] or inprocess:"


def make_target(spec: TargetSpec) -> Target:
    """The unconnected target of an address; raises `ConfigError` for an invalid one."""
    parts = split_address(spec.url)
    # Imported on use: each protocol has its own dependencies.
    if parts.scheme in HTTP_SCHEMES:
        try:
            from outrider.loadtest.targets.openai import OpenAiTarget
        except ModuleNotFoundError as error:
            raise ConfigError(not_installed(error) or str(error)) from None
        return OpenAiTarget(spec)
    if parts.scheme in GRPC_SCHEMES:
        from outrider.loadtest.targets.grpc_target import GrpcTarget

        return GrpcTarget(spec)
    from outrider.loadtest.targets.inprocess import InProcessTarget

    return InProcessTarget(spec)


def split_address(url: str) -> SplitResult:
    """The parts of a target's address; raises `ConfigError` for an invalid one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(
            f"the target {url!r} is not an address ({error}); give {_FORMS}."
        ) from None
    if parts.scheme == IN_PROCESS:
        return parts
    if parts.scheme not in (*GRPC_SCHEMES, *HTTP_SCHEMES) or not parts.hostname:
        raise ConfigError(f"the target {url!r} is not an address of a known kind; give {_FORMS}.")
    if parts.scheme in GRPC_SCHEMES and (port is None or parts.path not in ("", "/")):
        raise ConfigError(
            f"the target {url!r} must be a host and a port; give {parts.scheme}://HOST:PORT."
        )
    return parts


def is_inprocess(url: str) -> bool:
    """Whether the engine runs in the client process."""
    return url.startswith(f"{IN_PROCESS}:")
