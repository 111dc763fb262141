"""Sends a request and fails without an answer: send_request.py HOST:PORT [FOLDER]

The folder has the certificate to trust; without a folder there is no TLS. The key is in
OUTRIDER_API_KEY.
"""

import sys
from pathlib import Path

from outrider.client import Client
from outrider.errors import OutriderError

READY_S = 60.0


def authority(folder: str) -> Path:
    """The certificate's authority, or a self-signed certificate itself."""
    found = Path(folder) / "ca.crt"
    return found if found.exists() else Path(folder) / "tls.crt"


def main(server: str, *folders: str) -> None:
    tls = authority(folders[0]) if folders else None
    with Client(server, tls=tls) as client:
        client.wait_ready(READY_S)
        text = client.generate("The capital of France is", max_tokens=8, temperature=0).text
    if not text:
        sys.exit(f"error: {server} answered without a text")
    print(f"{server} answered: {text!r}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OutriderError as error:
        sys.exit(f"error: {error}")
