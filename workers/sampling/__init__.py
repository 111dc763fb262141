"""Sampling and verification: from the logits of a pass to the tokens it commits."""

from outrider.workers.sampling.chain import process
from outrider.workers.sampling.choose import GumbelOps, sample
from outrider.workers.sampling.draft import DraftStep, draft_sample
from outrider.workers.sampling.logprobs import token_logprobs
from outrider.workers.sampling.rows import RowSampler, Span
from outrider.workers.sampling.verify import SpanVerdict, VerificationMode, verify

__all__ = [
    "DraftStep",
    "GumbelOps",
    "RowSampler",
    "Span",
    "SpanVerdict",
    "VerificationMode",
    "draft_sample",
    "process",
    "sample",
    "token_logprobs",
    "verify",
]
