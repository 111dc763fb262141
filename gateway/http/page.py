"""The web page at /: files of the package, without external resources."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

from outrider.gateway.http.access import GatewayOf

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).resolve().parents[1] / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: str
    etag: str


@router.get("/")
async def index(request: Request, gateway: GatewayOf) -> Response:
    return _file_response(request, gateway.config.page, "index.html")


@router.get("/page/{name}")
async def part(name: str, request: Request, gateway: GatewayOf) -> Response:
    return _file_response(request, gateway.config.page, name)


def _file_response(request: Request, is_served: bool, name: str) -> Response:
    file = _files().get(name) if is_served else None
    if file is None:
        raise HTTPException(404, "Not Found" if is_served else "server.page is off")
    headers = _HEADERS | {"ETag": file.etag}
    known = request.headers.get("if-none-match", "")
    if file.etag in (each.strip().removeprefix("W/") for each in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.kind, headers=headers)


@cache
def _files() -> dict[str, _File]:
    """By name; read once: they do not change while the server runs."""
    return {path.name: _read(path) for path in FOLDER.iterdir() if path.suffix in _TYPES}


def _read(path: Path) -> _File:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _File(content, _TYPES[path.suffix], etag)
