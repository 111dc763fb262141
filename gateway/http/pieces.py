"""Large response bodies in pieces: the write buffer stays small for slow clients, and each piece
written shows that the client still reads."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PIECE_BYTES = 64 * 2**10


class SendInPieces:
    """Splits response bodies; the server applies backpressure before each piece."""

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
