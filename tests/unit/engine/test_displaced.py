"""A request that another tenant displaced from a full queue is refused like one that came late."""

from __future__ import annotations

from outrider.engine.resumable_requests import ResumableRequests
from outrider.links.gateway_messages import SubmittedSample
from outrider.scheduler.types import SampleId


def test_a_displaced_sample_is_known_by_its_reader_and_then_forgotten() -> None:
    cancelled: list[SampleId] = []
    held = ResumableRequests(60.0, 8, cancelled.append)
    held.add("r", 1, [SubmittedSample(5, 0)])
    assert held.forget_displaced(SampleId(1, 5)) == SampleId(1, 5)
    assert held.num_samples == 0 and cancelled == []
    assert held.forget_displaced(SampleId(1, 6)) == SampleId(1, 6)


def test_a_displaced_sample_that_has_moved_is_known_by_its_new_reader() -> None:
    held = ResumableRequests(60.0, 8, lambda own: None)
    held.add("r", 1, [SubmittedSample(5, 0)])
    held.attach("r", 2, (SubmittedSample(9, 0),))
    assert held.forget_displaced(SampleId(1, 5)) == SampleId(2, 9)
    assert held.num_samples == 0
