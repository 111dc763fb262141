"""The server's certificate and the CA of its clients, reloaded when they change."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from outrider.config import ServerConfig
from outrider.errors import ConfigError
from outrider.gateway.auth.watched_files import WatchedFiles


class TlsFiles:
    """TLS contexts of both protocols. A handshake uses the files as last loaded."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._context: ssl.SSLContext
        self._for_grpc: Any
        paths = [path for path in (cert, key, client_ca) if path is not None]
        self.watched = WatchedFiles("the certificates", paths, self._load)

    @classmethod
    def of(cls, config: ServerConfig) -> TlsFiles | None:
        """None for plaintext."""
        if config.tls_cert is None or config.tls_key is None:
            return None
        ca = config.tls_client_ca
        return cls(Path(config.tls_cert), Path(config.tls_key), None if ca is None else Path(ca))

    def http_context(self) -> ssl.SSLContext:
        """A context that switches each handshake to the newest one, with or without SNI."""
        context = self._made()

        def use_newest(connection: Any, host: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._context

        context.sni_callback = use_newest
        return context

    def grpc_credentials(self) -> Any:
        current = self._for_grpc

        def fetch() -> Any:
            nonlocal current
            if current is self._for_grpc:
                return None  # unchanged
            current = self._for_grpc
            return current

        return grpc.dynamic_ssl_server_credentials(
            current, fetch, require_client_authentication=self._client_ca is not None
        )

    def _load(self) -> None:
        context = self._made()
        chain, key = _read("tls_cert", self._cert), _read("tls_key", self._key)
        roots = None if self._client_ca is None else _read("tls_client_ca", self._client_ca)
        self._for_grpc = grpc.ssl_server_certificate_configuration([(key, chain)], roots)
        self._context = context

    def _made(self) -> ssl.SSLContext:
        for name, path in (("tls_cert", self._cert), ("tls_key", self._key)):
            _read(name, path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # An empty password: OpenSSL must not prompt for that of an encrypted key.
            context.load_cert_chain(self._cert, self._key, password="")
        except ssl.SSLError as error:
            mismatch = error.reason == "KEY_VALUES_MISMATCH"
            problem = "do not belong together" if mismatch else "are no PEM chain and plain key"
            raise ConfigError(
                f"server.tls_cert {str(self._cert)!r} and server.tls_key {str(self._key)!r} "
                f"{problem}; give a certificate and its own key."
            ) from None
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            _read("tls_client_ca", self._client_ca)
            try:
                context.load_verify_locations(self._client_ca)
            except ssl.SSLError:
                raise ConfigError(
                    f"server.tls_client_ca is {str(self._client_ca)!r}, which holds no "
                    "certificates in PEM; give those that clients' certificates are signed by."
                ) from None
        return context


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"server.{name} is {str(path)!r}, which cannot be read: {error.strerror}; give the "
            "path of a PEM file."
        ) from None
