"""The access log: one line per request, when it has ended. Lines of rejected requests are limited
per minute, key and reason; the others are counted."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from outrider.logs import request_context
from outrider.rate_limited_log import RateLimitedLog

if TYPE_CHECKING:
    from outrider.gateway.calls import Call
    from outrider.gateway.session import Session

logger = logging.getLogger("outrider.access")

FINISHED, REFUSED = "finished", "refused"  # the status of a request
MAX_TEXT_CHARS = 16_384  # of a prompt or a text, where these are logged
MAX_LABEL_CHARS = 128
MAX_REJECTIONS = 60  # a minute, of one key for one reason


class AccessLog:
    """Logs caller, sizes, times and speculation counts of each request.

    Prompts and texts are logged only `with_prompts`.
    """

    def __init__(self, *, with_prompts: bool) -> None:
        self._with_prompts = with_prompts
        self._rejections = RateLimitedLog(logger, burst=MAX_REJECTIONS)

    @property
    def is_enabled(self) -> bool:
        return logger.isEnabledFor(logging.INFO)

    def write(
        self,
        call: Call,
        session: Session | None,
        *,
        model: str,
        status: str,
        reason: str,
        start_s: float,
        total_s: float,
    ) -> None:
        """`session` is None for a request that was refused before it had one. Times are measured by
        the gateway, the time in the queue by the engine."""
        fields: dict[str, Any] = {
            "protocol": call.protocol,
            "label": call.label[:MAX_LABEL_CHARS],
            "key": call.caller.name,
            "model": model,
            "status": status,
            "reason": reason,
        }
        if session is not None:
            fields |= _sizes(session, start_s)
        fields["total_s"] = round(total_s, 6)
        if self._with_prompts and session is not None:
            fields |= _texts(session)
        known = call.request_id if session is None else session.output.request_id
        with request_context(_plain_or_dash(known)):
            if status == REFUSED:
                kind = (call.caller.name, reason)
                self._rejections.info(kind, "%s", _line(fields), fields=fields)
            else:
                logger.info("%s", _line(fields), extra={"fields": fields})


def _sizes(session: Session, start_s: float) -> dict[str, Any]:
    output = session.output
    first_s = output.metrics.first_token_s
    records = [each.speculation for each in output.outputs]
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.metrics.num_cached_tokens,
        "completion_tokens": sum(len(each.token_ids) for each in output.outputs),
        "rounds": sum(each.rounds for each in records),
        "drafted": sum(each.drafted for each in records),
        "accepted": sum(each.accepted for each in records),
        "resubmissions": session.resubmissions,
        "queue_s": round(output.metrics.queued_s, 6),
        "first_token_s": None if first_s is None else round(first_s - start_s, 6),
    }


def _texts(session: Session) -> dict[str, Any]:
    output = session.output
    prompt = output.prompt
    shown = str(output.prompt_token_ids) if prompt is None else prompt
    return {
        "prompt": shown[:MAX_TEXT_CHARS],
        "texts": [each.text[:MAX_TEXT_CHARS] for each in output.outputs],
    }


def _line(fields: dict[str, Any]) -> str:
    """name=value pairs; a value that is not one plain word is quoted."""
    return " ".join(f"{name}={_shown(value)}" for name, value in fields.items())


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "-"
    is_plain = isinstance(value, int | float) or _is_plain(str(value))
    return str(value) if is_plain else json.dumps(value)


def _plain_or_dash(request_id: str) -> str:
    """A request id that may not have been checked."""
    is_safe = request_id and _is_plain(request_id) and len(request_id) <= MAX_LABEL_CHARS
    return request_id if is_safe else "-"


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and not set(text) & set(' "=\\')
