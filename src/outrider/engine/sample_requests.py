"""The scheduler's request for one sample of a submitted spec."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.kernels.seeds import sample_seed
from outrider.scheduler.request import Request
from outrider.scheduler.types import RequestSpec, SampleId


def sample_request(
    spec: RequestSpec,
    index: int,
    sample_id: SampleId,
    *,
    arrival_s: float,
    deadline_s: float | None = None,
    output_ids: Sequence[int] = (),
    prompt_logprobs_sent: int = 0,
) -> Request:
    """Sample `index` of the spec, with its seed. The last two are those of `Request`."""
    return Request(
        sample_id,
        spec,
        seed=sample_seed(spec.seed, index),
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        output_ids=output_ids,
        prompt_logprobs_sent=prompt_logprobs_sent,
    )
