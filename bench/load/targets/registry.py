"""Which address is answered by which target."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from outrider.bench.load.targets.base import Target, TargetSpec
from outrider.errors import ConfigError
from outrider.requirements import not_installed

IN_PROCESS = "inprocess"
GRPC_SCHEMES = ("grpc", "grpcs")
HTTP_SCHEMES = ("http", "https")
_FORMS = "grpc://HOST:PORT, grpcs://HOST:PORT, http(s)://HOST[:PORT][/v1] or inprocess:"


def make_target(spec: TargetSpec) -> Target:
    """The target of an address, not yet connected; a wrong one is a `ConfigError`."""
    parts = split_address(spec.url)
    # Each imports what it speaks with, which the others do without.
    if parts.scheme in HTTP_SCHEMES:
        try:
            from outrider.bench.load.targets.openai import OpenAiTarget
        except ModuleNotFoundError as error:
            raise ConfigError(not_installed(error) or str(error)) from None
        return OpenAiTarget(spec)
    if parts.scheme in GRPC_SCHEMES:
        from outrider.bench.load.targets.grpc_target import GrpcTarget

        return GrpcTarget(spec)
    from outrider.bench.load.targets.inprocess import InProcessTarget

    return InProcessTarget(spec)


def split_address(url: str) -> SplitResult:
    """The parts of an address that a target can have; another is a `ConfigError`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the target {url!r} is no address ({error}); give {_FORMS}.") from None
    if parts.scheme == IN_PROCESS:
        return parts
    if parts.scheme not in (*GRPC_SCHEMES, *HTTP_SCHEMES) or not parts.hostname:
        raise ConfigError(f"the target {url!r} is no address of a known kind; give {_FORMS}.")
    if parts.scheme in GRPC_SCHEMES and (port is None or parts.path not in ("", "/")):
        raise ConfigError(
            f"the target {url!r} must be a host and a port; give {parts.scheme}://HOST:PORT."
        )
    return parts


def is_inprocess(url: str) -> bool:
    """Whether the models run in the client itself."""
    return url.startswith(f"{IN_PROCESS}:")
