"""Requests that outlive whoever reads them, and what was said of them until somebody comes back.

What a gateway was told need not have reached the client, so everything that is said of such a
request is kept from its submission on: a reader that comes back names the tokens it has, and is
told what follows them. That also shows how far the reader is, and what lies before is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from outrider.links.gateway_messages import SubmittedSample
from outrider.scheduler.types import RequestUpdate, SampleId

# Updates, and their tokens as often as each has log-probabilities: some 100 bytes each.
MOST_KEPT = 2**20


@dataclass(slots=True)
class _Sample:
    """One sample: `own` is what the scheduler knows it by, `reader` what its reader does."""

    own: SampleId
    reader: SampleId
    told: tuple[int, ...]  # what the reader had before the updates
    prompt_logprobs_told: int
    updates: list[RequestUpdate] = field(default_factory=list)
    is_finished: bool = False

    def rest(self, had: SubmittedSample) -> list[RequestUpdate] | None:
        """What follows what a reader has; None if it cannot have that, or too little to go on."""
        ids, place = had.output_ids, len(self.told)
        prompt_left = had.prompt_logprobs_sent - self.prompt_logprobs_told
        if ids[:place] != self.told or prompt_left < 0:
            return None
        rest: list[RequestUpdate] = []
        for update in self.updates:
            tokens, prompt = update.token_ids, update.prompt_logprobs
            cut, prompt_cut = min(len(ids) - place, len(tokens)), min(prompt_left, len(prompt))
            if ids[place : place + cut] != tokens[:cut]:
                return None
            place += cut
            prompt_left -= prompt_cut
            if not cut and not prompt_cut:
                rest.append(update)
            elif (cut, prompt_cut) != (len(tokens), len(prompt)) or update.finish_reason:
                rest.append(_without(update, cut, prompt_cut))
        return None if place < len(ids) or prompt_left else rest


@dataclass(slots=True, eq=False)
class _Request:
    """The samples by their indices, and how much is kept of them."""

    resume_id: str
    samples: dict[int, _Sample]
    has_reader: bool = True
    is_kept: bool = True  # else it only runs for the reader it has
    weight: int = 0
    ends_s: float = 0.0  # when nobody is waited for any more


@dataclass(frozen=True, slots=True)
class Attachment:
    """What came of an attempt to attach. `left` were read by somebody else until now."""

    is_held: bool
    updates: tuple[RequestUpdate, ...] = ()
    left: tuple[SampleId, ...] = ()


class HeldRequests:
    """Those that were submitted with a `resume_id`.

    Without a reader they go on for `window_s`, at most `most_requests` of them. `cancel` ends a
    sample in the scheduler. Of all together at most `most_kept` is kept: beyond that those that
    have lost their reader first are ended, then those are not kept any more that still have theirs.
    """

    def __init__(
        self,
        window_s: float,
        most_requests: int,
        cancel: Callable[[SampleId], None],
        most_kept: int = MOST_KEPT,
    ) -> None:
        self._window_s = window_s
        self._most_requests = most_requests
        self._most_kept = most_kept
        self._cancel = cancel
        self._by_id: dict[str, _Request] = {}  # those that are kept, the oldest first
        self._alone: dict[str, _Request] = {}  # of these: without a reader, the longest so first
        self._by_own: dict[SampleId, tuple[_Request, _Sample]] = {}
        self._by_reader: dict[SampleId, tuple[_Request, _Sample]] = {}
        self._weight = 0

    @property
    def num_alone(self) -> int:
        """Requests that wait for their readers."""
        return len(self._alone)

    @property
    def num_known(self) -> int:
        """Samples known of."""
        return len(self._by_own)

    # -- while they have their readers --------------------------------------------------------

    def add(self, resume_id: str, link: int, samples: Iterable[SubmittedSample]) -> None:
        """The scheduler has taken these samples of the gateway at the link."""
        former = self._by_id.get(resume_id)
        if former is not None:
            self._stop_keeping(former)
        request = _Request(resume_id, {})
        for each in samples:
            own = SampleId(link, each.handle)
            sample = _Sample(own, own, each.output_ids, each.prompt_logprobs_sent)
            request.samples[each.index] = sample
            self._by_own[own] = self._by_reader[own] = request, sample
        if request.samples:
            self._by_id[resume_id] = request

    def take(self, update: RequestUpdate) -> RequestUpdate | None:
        """Keep an update; returns it as its reader is to have it, None if there is no reader."""
        found = self._by_own.get(update.sample_id)
        if found is None:
            return update
        request, sample = found
        shown: RequestUpdate | None = None
        if request.has_reader:
            is_same = sample.reader == sample.own
            shown = update if is_same else replace(update, sample_id=sample.reader)
        if request.is_kept:
            sample.updates.append(update)
            self._weigh(request, _weight_of(update))
        if update.finish_reason is not None:
            sample.is_finished = True
            if not request.is_kept:
                self._forget(request, sample)
        while self._weight > self._most_kept:
            self._make_room()
        return shown

    def cancel(self, reader: SampleId) -> None:
        """Its reader wants no more of this sample. One that is not held is ended all the same."""
        found = self._by_reader.get(reader)
        if found is not None:
            self._end_sample(*found)
        elif reader not in self._by_own:  # else it is somebody else's to read by now
            self._cancel(reader)

    def forget_displaced(self, own: SampleId) -> SampleId:
        """The scheduler has refused a sample after all; returns what its reader knows it by."""
        found = self._by_own.get(own)
        if found is None:
            return own
        request, sample = found
        sample.is_finished = True
        self._forget(request, sample)
        return sample.reader

    # -- when they lose them ------------------------------------------------------------------

    def let_go(self, readers: Iterable[SampleId], now_s: float) -> None:
        """These have lost their reader, and with them all of their requests."""
        for reader in readers:
            found = self._by_reader.get(reader)
            if found is None:
                self.cancel(reader)
            else:
                self._leave_alone(found[0], now_s)

    def part_with(self, link: int, now_s: float) -> None:
        """The link of a gateway has ended."""
        theirs = [found[0] for reader, found in self._by_reader.items() if reader.link == link]
        for request in dict.fromkeys(theirs):
            self._leave_alone(request, now_s)

    def expire(self, now_s: float) -> None:
        """End those that nobody has come back for in time."""
        while self._alone and (first := next(iter(self._alone.values()))).ends_s <= now_s:
            self._end(first)

    def attach(self, resume_id: str, link: int, samples: tuple[SubmittedSample, ...]) -> Attachment:
        """Let the gateway at the link read on, also in place of another. Samples it does not name
        are ended; so is the whole request if it has not gone on from what the reader has."""
        request = self._by_id.get(resume_id)
        if request is None:
            return Attachment(is_held=False)
        left: tuple[SampleId, ...] = ()
        if request.has_reader:
            left = tuple(sample.reader for sample in request.samples.values())
        rests: dict[int, list[RequestUpdate]] = {}
        for had in samples:
            sample = request.samples.get(had.index)
            rest = None if sample is None else sample.rest(had)
            if rest is None:
                self._end(request)
                return Attachment(is_held=False, left=left)
            rests[had.index] = rest
        for index in request.samples.keys() - rests.keys():
            self._end_sample(request, request.samples[index])
        updates = [
            update
            for had in samples
            for update in self._move(request, SampleId(link, had.handle), had, rests[had.index])
        ]
        self._alone.pop(resume_id, None)
        request.has_reader = True
        return Attachment(True, tuple(updates), left)

    # -- inside -------------------------------------------------------------------------------

    def _move(
        self,
        request: _Request,
        reader: SampleId,
        had: SubmittedSample,
        rest: list[RequestUpdate],
    ) -> list[RequestUpdate]:
        sample = request.samples[had.index]
        self._by_reader.pop(sample.reader, None)
        self._weigh(request, sum(map(_weight_of, rest)) - sum(map(_weight_of, sample.updates)))
        sample.reader, sample.updates = reader, rest
        sample.told, sample.prompt_logprobs_told = had.output_ids, had.prompt_logprobs_sent
        self._by_reader[reader] = request, sample
        return [replace(update, sample_id=reader) for update in rest]

    def _leave_alone(self, request: _Request, now_s: float) -> None:
        # Of which nothing was ever said, nobody knows that it can be resumed.
        is_known = any(sample.told or sample.updates for sample in request.samples.values())
        if not request.is_kept or not is_known:
            self._end(request)
            return
        request.has_reader = False
        for sample in request.samples.values():
            self._by_reader.pop(sample.reader, None)
        request.ends_s = now_s + self._window_s
        self._alone[request.resume_id] = request
        while len(self._alone) > self._most_requests:
            self._end(next(iter(self._alone.values())))

    def _make_room(self) -> None:
        if self._alone:
            self._end(next(iter(self._alone.values())))
        else:
            self._stop_keeping(next(iter(self._by_id.values())))

    def _stop_keeping(self, request: _Request) -> None:
        """It only runs for the reader it has, if it has one."""
        if not request.has_reader:
            self._end(request)
            return
        request.is_kept = False
        self._weigh(request, -request.weight)
        del self._by_id[request.resume_id]
        for sample in list(request.samples.values()):
            sample.updates = []
            if sample.is_finished:
                self._forget(request, sample)

    def _end(self, request: _Request) -> None:
        for sample in list(request.samples.values()):
            self._end_sample(request, sample)

    def _end_sample(self, request: _Request, sample: _Sample) -> None:
        self._forget(request, sample)
        if not sample.is_finished:
            self._cancel(sample.own)

    def _forget(self, request: _Request, sample: _Sample) -> None:
        request.samples = {
            index: each for index, each in request.samples.items() if each is not sample
        }
        self._by_own.pop(sample.own, None)
        self._by_reader.pop(sample.reader, None)
        self._weigh(request, -sum(map(_weight_of, sample.updates)))
        if not request.samples and self._by_id.get(request.resume_id) is request:
            del self._by_id[request.resume_id]
            self._alone.pop(request.resume_id, None)

    def _weigh(self, request: _Request, change: int) -> None:
        request.weight += change
        self._weight += change


def _weight_of(update: RequestUpdate) -> int:
    tops = (len(found.top) for found in (*update.logprobs, *update.prompt_logprobs))
    return 1 + len(update.token_ids) + sum(tops)


def _without(update: RequestUpdate, cut: int, prompt_cut: int) -> RequestUpdate:
    """The update for somebody who has its first tokens and log-probabilities of the prompt."""
    return replace(
        update,
        token_ids=update.token_ids[cut:],
        num_accepted=max(update.num_accepted - cut, 0),
        num_drafted=max(update.num_drafted - cut, 0),
        num_verified=max(update.num_verified - cut, 0),
        logprobs=update.logprobs[cut:],
        prompt_logprobs=update.prompt_logprobs[prompt_cut:],
    )
