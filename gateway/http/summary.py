"""Usage and speculation statistics of a request, over all its prompts and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.api_types.convert import stats_to_proto
from outrider.gateway.session import Session
from outrider.scheduler.types import NO_PROPOSER


def usage(sessions: Sequence[Session]) -> dict[str, Any]:
    outputs = [session.output for session in sessions]
    num_read = sum(len(output.prompt_token_ids) for output in outputs)
    num_written = sum(output.num_generated for output in outputs)
    return {
        "prompt_tokens": num_read,
        "completion_tokens": num_written,
        "total_tokens": num_read + num_written,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.metrics.num_cached_tokens for output in outputs)
        },
    }


def speculation_stats(sessions: Sequence[Session]) -> dict[str, Any]:
    """The first four as vLLM defines them: it counts only rounds in which drafts were verified."""
    outputs = [session.output for session in sessions]
    total = stats_to_proto(each.speculation for output in outputs for each in output.outputs)
    verified_at, accepted_at = list(total.verified_at), list(total.accepted_at)
    num_drafts = verified_at[0] if verified_at else 0
    drafted, accepted = total.drafted_tokens, total.accepted_tokens
    first = [found for each in outputs if (found := each.metrics.time_to_first_token_s) is not None]
    whole = [found for each in outputs if (found := each.metrics.latency_s) is not None]
    return {
        "mean_acceptance_length": 1 + accepted / num_drafts if num_drafts else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_rate_per_position": [each / num_drafts for each in accepted_at],
        "acceptance_histogram": _histogram(num_drafts, accepted_at),
        "rounds": total.rounds,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "verified_per_position": verified_at,
        "accepted_per_position": accepted_at,
        "time_to_first_token_s": min(first, default=None),
        "total_s": max(whole, default=None),
        "resubmissions": sum(session.resubmissions for session in sessions),
    }


def request_metrics(sessions: Sequence[Session]) -> dict[str, Any] | None:
    """vLLM's `metrics` of a response, as AIPerf reads them: of a single text with a proposer.
    vLLM counts only rounds in which drafts were verified."""
    session = sessions[0]
    if len(sessions) > 1 or len(session.output.outputs) > 1:
        return None
    spec, record = session.prepared.spec, session.output.outputs[0].speculation
    if spec.proposer == NO_PROPOSER:
        return None
    num_steps = record.verified_at[0] if record.verified_at else 0
    max_depth = max(spec.depth, len(record.verified_at))
    by_number = _histogram(num_steps, record.accepted_at)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + record.accepted / num_steps if num_steps else 1.0,
            "draft_acceptance_rate": record.acceptance_rate,
            "acceptance_histogram": [
                by_number.get(str(number), 0) for number in range(max_depth + 1)
            ],
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": record.accepted,
            "num_draft_tokens": record.drafted,
            "num_spec_tokens": max_depth,
        }
    }


def _histogram(num_drafts: int, accepted_at: list[int]) -> dict[str, int]:
    """Rounds by their number of accepted draft tokens; numbers that did not occur are left out."""
    at_least = [num_drafts, *accepted_at, 0]
    exactly = (more - less for more, less in zip(at_least, at_least[1:], strict=False))
    return {str(number): count for number, count in enumerate(exactly) if count}
