"""The server section: listeners, access and limits of clients."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from dataclasses import dataclass

from outrider.config.rules import (
    FLAG,
    NOT_NEGATIVE,
    POSITIVE,
    FieldError,
    Rule,
    Validated,
    choice,
    names_rule,
    setting,
    text_rule,
    whole,
)
from outrider.scheduler.params import MAX_LOGPROBS, MAX_SAMPLES

_FILE = text_rule("the path of a file", optional=True)
# Characters that a header can carry.
_KEY = re.compile(r"[!-~]{1,512}")
_SECRET = Rule(
    str,
    "a key of 1 to 512 letters, digits and signs of ASCII without spaces, or unset",
    lambda v: _KEY.fullmatch(v) is not None,
    optional=True,
    is_secret=True,
)


def _are_networks(names: tuple[str, ...]) -> bool:
    try:
        return all(ipaddress.ip_network(name, strict=False) for name in names)
    except ValueError:
        return False


_NETWORKS = Rule(
    tuple, "addresses or networks such as 10.0.0.0/8, with commas between them", _are_networks
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Validated):
    """How clients reach the server."""

    _section = "server."

    host: str = setting("127.0.0.1", text_rule("an address to listen on"), "Address of the server.")
    port: int = setting(8000, whole(0, 65535), "Port of HTTP; 0 takes a free one.")
    grpc_port: int = setting(50051, whole(0, 65535), "Port of gRPC; 0 takes a free one.")
    admin_port: int | None = setting(
        None,
        whole(0, 65535, optional=True),
        "Port of /livez, /readyz and /metrics for probes and scrapers, without keys or TLS; unset "
        "opens none.",
    )
    processes: int = setting(
        1,
        whole(0, 64),
        "Gateway processes that share the ports; limits are divided among them. 0 leaves all "
        "requests to gateways elsewhere, which need cluster.listen.",
    )
    controllers: tuple[str, ...] = setting(
        (),
        names_rule("addresses as host:port, with commas between them"),
        "Servers (cluster.listen) whose replicas a standalone gateway serves; a name stands for "
        "all its addresses.",
    )

    # -- what is served
    model_names: tuple[str, ...] = setting(
        (),
        names_rule("names, with commas between them"),
        "Names the model is served under, the first in answers; empty is that of target.model.",
    )
    generation_config: str = setting(
        "auto",
        choice("auto", "none"),
        "Whether sampling defaults come from the checkpoint's generation_config.json.",
    )
    chat_template: str | None = setting(
        None, _FILE, "Jinja file used instead of the model's own chat template."
    )
    allow_client_templates: bool = setting(
        False,
        FLAG,
        "Let clients send chat templates; these are programs, and run in a process with limits.",
    )
    page: bool = setting(True, FLAG, "Serve the page at /.")
    unknown_fields: str = setting(
        "warn",
        choice("warn", "refuse"),
        "How an unknown top-level field of a completion or chat request is handled: 'warn' ignores "
        "it and names it in a header, 'refuse' answers 400.",
    )

    # -- who may call
    api_key: str | None = setting(
        None, _SECRET, "The API key that clients must send; OUTRIDER_API_KEY sets it too."
    )
    api_keys_file: str | None = setting(
        None, _FILE, "File of API keys with their limits, read again when it changes."
    )
    allow_anonymous: bool = setting(
        False, FLAG, "Listen on other addresses than the loopback without API keys."
    )
    tls_cert: str | None = setting(
        None, _FILE, "Certificate chain (PEM), read again when it changes; unset is plaintext."
    )
    tls_key: str | None = setting(None, _FILE, "Private key (PEM) of the certificate.")
    tls_client_ca: str | None = setting(
        None, _FILE, "Authorities (PEM) that must have issued clients' certificates."
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        names_rule("origins, with commas between them"),
        "Origins whose pages may call from a browser; '*' is any.",
    )

    # -- limits
    max_requests: int = setting(
        1024,
        whole(1),
        "Maximum number of active requests; further ones are refused until some end.",
    )
    max_body_bytes: int = setting(4 * 2**20, whole(1024), "Largest request in bytes.")
    max_prompt_tokens: int | None = setting(
        None, whole(1, optional=True), "Longest prompt in tokens; unset is what the model holds."
    )
    max_samples: int = setting(MAX_SAMPLES, whole(1, MAX_SAMPLES), "Maximum samples per request.")
    max_logprobs: int = setting(
        MAX_LOGPROBS, whole(0, MAX_LOGPROBS), "Maximum log-probabilities per token."
    )
    max_streams_per_connection: int = setting(
        256, whole(1), "Maximum concurrent gRPC calls per connection."
    )
    max_connections_per_address: int | None = setting(
        None,
        whole(0, optional=True),
        "Maximum connections of each protocol from one client address (of IPv6 its /64), in each "
        "process; unset is a quarter of all connections but at least 64, and 0 is no bound.",
    )
    trusted_proxies: tuple[str, ...] = setting(
        (),
        _NETWORKS,
        "Addresses or networks of proxies, whose connections carry many clients: no bound per "
        "address, and the usual idle timeout from the start.",
    )
    max_connection_age_s: float | None = setting(
        None,
        dataclasses.replace(POSITIVE, expected="a number > 0, or unset", optional=True),
        "Seconds after which gRPC clients are asked to reconnect, so that they spread over added "
        "gateways; unset is never.",
    )
    max_connection_grace_s: float = setting(
        600.0, POSITIVE, "Seconds that calls on such a connection get to finish."
    )
    header_timeout_s: float = setting(
        10.0, POSITIVE, "Seconds a client has to send a request's headers."
    )
    queue_timeout_s: float = setting(
        300.0, POSITIVE, "Seconds a request may wait for its first token before it is cancelled."
    )

    # -- resumption and draining
    resume_window_s: float = setting(
        120.0, POSITIVE, "Seconds that a resumable request runs on without its connection."
    )
    max_resumable: int = setting(
        1024, whole(0), "Maximum number of requests that run on without their connections."
    )
    drain_s: float = setting(
        10.0, NOT_NEGATIVE, "Seconds that running requests get to finish when the server stops."
    )

    # -- metrics and logs
    vllm_metrics: bool = setting(
        True, FLAG, "Export metrics under vLLM's names too, for dashboards that expect them."
    )
    log_prompts: bool = setting(False, FLAG, "Write prompts and texts to the log.")

    def _check_together(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key")
            if self.tls_cert is None:
                given, missing = missing, given
            raise FieldError(
                (f"server.{given}",), f"is set without server.{missing}; TLS needs both."
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise FieldError(
                ("server.tls_client_ca",),
                "is set without server.tls_cert; clients' certificates need TLS.",
            )
        if self.api_key is not None and self.api_keys_file is not None:
            raise FieldError(
                ("server.api_key", "server.api_keys_file"),
                "is set beside server.api_keys_file; put the key into the file.",
            )
