"""Who may go on with a stream whose connection was lost, and from what.

Request ids are the client's own to choose, so they give nobody any right. A token does: it names
the request to the engine that may hold it, and is signed together with the request, its seed and
the name of the caller's key. The key of the signature follows from the secret that engine and
gateways share, so every gateway of a server takes the tokens of every other.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import dataclass

from outrider.errors import RequestError
from outrider.gateway.errors import ForbiddenError
from outrider.proto import generation_pb2
from outrider.scheduler.params import MAX_SAMPLES
from outrider.scheduler.types import RequestSpec
from outrider.text.builder import HeldText
from outrider.text.outputs import Speculation

# Making text of so many tokens takes a thread some seconds.
MAX_HELD_TOKENS = 2**18
MAX_TOKEN_CHARS = 256
_MAX_POSITIONS = 32  # of drafts in a round
_MAX_COUNT = 2**40
_ID_BYTES, _DIGEST_BYTES = 16, 32
_LABEL = b"outrider resume tokens 1"


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a client has of a request, and brings back."""

    resume_id: str
    seed: int
    samples: tuple[HeldText, ...]
    num_prompt_logprobs: int

    def check(self, spec: RequestSpec, vocab_size: int) -> None:
        """What is held is read like a prompt, and within the same limits."""
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
                "send the request anew."
            )
        wanted = 0 if spec.params.prompt_logprobs is None else len(spec.prompt_ids)
        if self.num_prompt_logprobs > wanted:
            raise RequestError(
                f"prompt_logprobs is {self.num_prompt_logprobs}, but the request has {wanted} to "
                "tell; resume with what was received."
            )

    def _check_tokens(self, held: HeldText, spec: RequestSpec, vocab_size: int) -> None:
        most = spec.max_len - len(spec.prompt_ids)
        if len(held.token_ids) > most:
            raise RequestError(
                f"sample {held.index} holds {len(held.token_ids)} tokens, but the request may "
                f"write {most}; resume with what was received."
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
            HeldText(
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
    """Of a request as it was sent."""
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()


def new_resume_id() -> str:
    return secrets.token_hex(_ID_BYTES)


class ResumeTokens:
    """Writes and reads tokens of the gateways that share a secret."""

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self._key = hmac.digest(secret.encode(), _LABEL, hashlib.sha256)

    def make(self, resume_id: str, caller: str, request: bytes, seed: int) -> str:
        """For the request of that digest."""
        body = bytes.fromhex(resume_id) + _bound(request, seed)
        return base64.urlsafe_b64encode(body + self._sign(body, caller)).decode()

    def read(self, token: str, caller: str, request: bytes, seed: int) -> str:
        """The `resume_id` in a token for this request of this caller; raises `ForbiddenError`."""
        body = self._body(token, caller)
        if not hmac.compare_digest(body[_ID_BYTES:], _bound(request, seed)):
            raise _forbidden()
        return body[:_ID_BYTES].hex()

    def resume_id(self, token: str, caller: str) -> str:
        """The same, for whichever request of this caller it is."""
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
        "resume_token is not that of this request, its seed and your key; give the one that came "
        "with its first message, or send the request anew."
    )
