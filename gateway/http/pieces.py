"""Large answers in pieces, so that what a slow client has not read yet stays with the application
and each piece shows that it goes on reading."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PIECE_BYTES = 64 * 2**10


class SendInPieces:
    """Splits the bodies of answers; the server waits before each until there is room for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_pieces(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= PIECE_BYTES:
                await send(message)
                return
            view = memoryview(body)
            for start in range(0, len(body), PIECE_BYTES):
                end = start + PIECE_BYTES
                more = end < len(body) or message.get("more_body", False)
                await send({**message, "body": bytes(view[start:end]), "more_body": more})

        await self._app(scope, receive, send_pieces)
