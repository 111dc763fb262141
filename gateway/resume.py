"""Resumption of a stream whose connection was lost: the signed token, and the client's state.

Clients choose request ids, so an id authorizes nothing. A resume token does: it names the request
to the engine that may hold it, and is signed together with the request, its seed and the name of
the caller's key. The signing key is derived from the secret that engines and gateways share, so
every gateway of a server accepts the tokens of all others.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import dataclass

from outrider.api_types.errors import ForbiddenError
from outrider.errors import RequestError
from outrider.proto import generation_pb2
from outrider.scheduler.params import MAX_SAMPLES
from outrider.scheduler.types import RequestSpec
from outrider.text.builder import ResumedText
from outrider.text.outputs import Speculation

# Detokenizing this many tokens takes a thread some seconds.
MAX_HELD_TOKENS = 2**18
MAX_TOKEN_CHARS = 256
_MAX_POSITIONS = 32  # of draft tokens in a round
_MAX_COUNT = 2**40
_ID_BYTES, _DIGEST_BYTES = 16, 32
_LABEL = b"outrider resume tokens 1"


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a client has received of a request and sends to resume it."""

    resume_id: str
    seed: int
    samples: tuple[ResumedText, ...]
    num_prompt_logprobs: int

    def check(self, spec: RequestSpec, vocab_size: int) -> None:
        """Check the client's state: it is untrusted input, like a prompt."""
        seen: set[int] = set()
        for held in self.samples:
            if held.index >= spec.params.n or held.index in seen:
                raise RequestError(
                    f"samples holds sample {held.index}; give each of the {spec.params.n} from 0 "
                    "on once at most."
                )
            seen.add(held.index)
            self._check_tokens(held, spec, vocab_size)
        if sum(len(held.token_ids) for held in self.samples) > MAX_HELD_TOKENS:
            raise RequestError(
                f"samples holds more than {MAX_HELD_TOKENS} tokens, which are too many to resume; "
                "send the request again."
            )
        limit = 0 if spec.params.prompt_logprobs is None else len(spec.prompt_ids)
        if self.num_prompt_logprobs > limit:
            raise RequestError(
                f"prompt_logprobs is {self.num_prompt_logprobs}, but the request has {limit} of "
                "them; resume with what was received."
            )

    def _check_tokens(self, held: ResumedText, spec: RequestSpec, vocab_size: int) -> None:
        limit = spec.max_len - len(spec.prompt_ids)
        if len(held.token_ids) > limit:
            raise RequestError(
                f"sample {held.index} holds {len(held.token_ids)} tokens, but the request may "
                f"generate {limit}; resume with what was received."
            )
        wrong = next((token for token in held.token_ids if token >= vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"sample {held.index} holds {wrong}; token ids must be from 0 to {vocab_size - 1}."
            )


def resumption_from_proto(request: generation_pb2.ResumeRequest, resume_id: str) -> Resumption:
    if len(request.samples) > MAX_SAMPLES:
        raise RequestError(
            f"samples has {len(request.samples)} entries; a request has at most {MAX_SAMPLES}."
        )
    return Resumption(
        resume_id,
        request.seed,
        tuple(
            ResumedText(
                each.index,
                tuple(each.token_ids),
                each.finished,
                each.cumulative_logprob,
                _speculation(each),
            )
            for each in request.samples
        ),
        request.prompt_logprobs,
    )


def _speculation(held: generation_pb2.HeldSample) -> Speculation:
    stats = held.speculation
    counts = (stats.rounds, stats.drafted_tokens, stats.accepted_tokens)
    verified_at, accepted_at = list(stats.verified_at), list(stats.accepted_at)
    is_sound = len(verified_at) == len(accepted_at) <= _MAX_POSITIONS
    if not is_sound or max(*counts, *verified_at, *accepted_at) > _MAX_COUNT:
        raise RequestError(
            f"the speculation of sample {held.index} cannot be right; leave it out, or give what "
            "was received."
        )
    drafted_by_token = [False] * len(held.token_ids)
    return Speculation(*counts, drafted_by_token, verified_at, accepted_at)


# -- tokens -----------------------------------------------------------------------------------


def digest_of(request: generation_pb2.GenerateRequest) -> bytes:
    """The digest of a request as it was sent."""
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()


def new_resume_id() -> str:
    return secrets.token_hex(_ID_BYTES)


class ResumeTokens:
    """Signs and verifies the resume tokens of the gateways that share a secret."""

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self._key = hmac.digest(secret.encode(), _LABEL, hashlib.sha256)

    def make(self, resume_id: str, caller: str, request: bytes, seed: int) -> str:
        """A token for the request with this digest."""
        body = bytes.fromhex(resume_id) + _bound(request, seed)
        return base64.urlsafe_b64encode(body + self._sign(body, caller)).decode()

    def read(self, token: str, caller: str, request: bytes, seed: int) -> str:
        """The `resume_id` in a token for this request of this caller; raises `ForbiddenError`."""
        body = self._body(token, caller)
        if not hmac.compare_digest(body[_ID_BYTES:], _bound(request, seed)):
            raise _forbidden()
        return body[:_ID_BYTES].hex()

    def resume_id(self, token: str, caller: str) -> str:
        """The `resume_id` in a token for any request of this caller."""
        return self._body(token, caller)[:_ID_BYTES].hex()

    def _body(self, token: str, caller: str) -> bytes:
        try:
            if len(token) > MAX_TOKEN_CHARS:
                raise _forbidden()
            given = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise _forbidden() from None
        size = _ID_BYTES + _DIGEST_BYTES
        body, signature = given[:size], given[size:]
        if len(body) != size or not hmac.compare_digest(signature, self._sign(body, caller)):
            raise _forbidden()
        return body

    def _sign(self, body: bytes, caller: str) -> bytes:
        named = caller.encode(errors="surrogatepass")
        return hmac.digest(self._key, body + named, hashlib.sha256)


def _bound(request: bytes, seed: int) -> bytes:
    return hashlib.sha256(request + seed.to_bytes(8, "big")).digest()


def _forbidden() -> ForbiddenError:
    return ForbiddenError(
        "resume_token is not valid for this request, its seed and your key; give the one that came "
        "with its first message, or send the request again."
    )
