"""Certificates for the tests: an authority, and whoever it vouches for."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """Files (PEM) of a certificate, of its key, and of both."""

    cert: Path
    key: Path
    both: Path


class Authority:
    """Issues certificates into a folder. `cert` is its own."""

    def __init__(self, folder: Path, name: str = "an authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self._num_issued = 0
        builder = _builder(self._name, self._name, self._key, ended=False)
        constraint = x509.BasicConstraints(ca=True, path_length=None)
        made = builder.add_extension(constraint, critical=True).sign(self._key, hashes.SHA256())
        self.cert = folder / f"{name.replace(' ', '-')}.pem"
        self.cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str = "127.0.0.1", *, expired: bool = False, address: str = "127.0.0.1"
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name), self._name, key, ended=expired)
        alternatives = [
            x509.IPAddress(ipaddress.ip_address(address)),
            x509.DNSName("localhost"),
        ]
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        made = builder.sign(self._key, hashes.SHA256())
        self._num_issued += 1
        stem = f"{self.cert.stem}-{self._num_issued}"
        paths = (self._folder / f"{stem}.{kind}.pem" for kind in ("cert", "key", "both"))
        pair = Pair(*paths)
        cert = made.public_bytes(serialization.Encoding.PEM)
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        pair.cert.write_bytes(cert)
        pair.key.write_bytes(private)
        pair.both.write_bytes(cert + private)
        return pair


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, ended: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 3 * _DAY)
        .not_valid_after(now - _DAY if ended else now + _DAY)
    )
