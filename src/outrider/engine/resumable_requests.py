"""Resumable requests: they keep running without a reader and buffer their updates for the next.

An update sent to a gateway may not have reached the client, so all updates of such a request are
buffered from its submission on. A reader that attaches names the tokens it has and gets the updates
that follow; the updates before them are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from outrider.links.gateway_messages import SubmittedSample
from outrider.scheduler.types import RequestUpdate, SampleId

# Updates, tokens and log-probabilities: about 100 bytes each.
MAX_KEPT = 2**20


@dataclass(slots=True)
class _Sample:
    """One sample: `own` is its id in the scheduler, `reader` its id for its reader."""

    own: SampleId
    reader: SampleId
    sent_ids: tuple[int, ...]  # the reader had them before the buffered updates
    prompt_logprobs_sent: int
    updates: list[RequestUpdate] = field(default_factory=list)
    is_finished: bool = False

    def rest(self, had: SubmittedSample) -> list[RequestUpdate] | None:
        """The updates that follow what a reader has; None if its tokens differ from the sample's,
        or the updates that follow them are gone."""
        ids, place = had.output_ids, len(self.sent_ids)
        prompt_left = had.prompt_logprobs_sent - self.prompt_logprobs_sent
        if ids[:place] != self.sent_ids or prompt_left < 0:
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
    """A request's samples by index, and the weight of their buffered updates."""

    resume_id: str
    samples: dict[int, _Sample]
    has_reader: bool = True
    is_buffered: bool = True  # else it cannot be resumed and ends with its present reader
    weight: int = 0
    expires_s: float = 0.0  # without a reader by then, it is cancelled


@dataclass(frozen=True, slots=True)
class Attachment:
    """The result of `attach`. `replaced` are the ids of the previous reader, if it was still
    there."""

    is_held: bool
    updates: tuple[RequestUpdate, ...] = ()
    replaced: tuple[SampleId, ...] = ()


class ResumableRequests:
    """The requests that were submitted with a `resume_id`.

    Detached, they run on for `window_s`, at most `max_detached` of them. `cancel` ends a sample in
    the scheduler. At most `max_kept` updates and tokens are buffered in total: beyond that, the
    requests detached longest are cancelled, then attached ones lose their buffers.
    """

    def __init__(
        self,
        window_s: float,
        max_detached: int,
        cancel: Callable[[SampleId], None],
        max_kept: int = MAX_KEPT,
    ) -> None:
        self._window_s = window_s
        self._max_detached = max_detached
        self._max_kept = max_kept
        self._cancel = cancel
        self._by_id: dict[str, _Request] = {}  # buffered ones, oldest first
        self._detached: dict[str, _Request] = {}  # of these without a reader, longest first
        self._by_own: dict[SampleId, tuple[_Request, _Sample]] = {}
        self._by_reader: dict[SampleId, tuple[_Request, _Sample]] = {}
        self._weight = 0

    @property
    def num_detached(self) -> int:
        """Requests without a reader."""
        return len(self._detached)

    @property
    def num_samples(self) -> int:
        """Samples of all requests here."""
        return len(self._by_own)

    # -- attached -------------------------------------------------------------------------------

    def add(self, resume_id: str, link: int, samples: Iterable[SubmittedSample]) -> None:
        """The scheduler has accepted these samples from the gateway at the link."""
        former = self._by_id.get(resume_id)
        if former is not None:
            self._stop_buffering(former)
        request = _Request(resume_id, {})
        for each in samples:
            own = SampleId(link, each.handle)
            sample = _Sample(own, own, each.output_ids, each.prompt_logprobs_sent)
            request.samples[each.index] = sample
            self._by_own[own] = self._by_reader[own] = request, sample
        if request.samples:
            self._by_id[resume_id] = request

    def take(self, update: RequestUpdate) -> RequestUpdate | None:
        """Buffer an update; returns it with the reader's sample id, None without a reader."""
        found = self._by_own.get(update.sample_id)
        if found is None:
            return update
        request, sample = found
        outgoing: RequestUpdate | None = None
        if request.has_reader:
            is_same = sample.reader == sample.own
            outgoing = update if is_same else replace(update, sample_id=sample.reader)
        if request.is_buffered:
            sample.updates.append(update)
            self._weigh(request, _weight_of(update))
        if update.finish_reason is not None:
            sample.is_finished = True
            if not request.is_buffered:
                self._forget(request, sample)
        while self._weight > self._max_kept:
            self._make_room()
        return outgoing

    def cancel(self, reader: SampleId) -> None:
        """The reader cancels this sample, resumable or not."""
        found = self._by_reader.get(reader)
        if found is not None:
            self._end_sample(*found)
        elif reader not in self._by_own:  # else another reader has attached to it
            self._cancel(reader)

    def forget_displaced(self, own: SampleId) -> SampleId:
        """The scheduler has displaced a waiting sample; returns its id for its reader."""
        found = self._by_own.get(own)
        if found is None:
            return own
        request, sample = found
        sample.is_finished = True
        self._forget(request, sample)
        return sample.reader

    # -- detached -------------------------------------------------------------------------------

    def detach(self, readers: Iterable[SampleId], now_s: float) -> None:
        """These samples have lost their reader; their requests detach as a whole."""
        for reader in readers:
            found = self._by_reader.get(reader)
            if found is None:
                self.cancel(reader)
            else:
                self._detach(found[0], now_s)

    def detach_link(self, link: int, now_s: float) -> None:
        """The link of a gateway has ended."""
        theirs = [found[0] for reader, found in self._by_reader.items() if reader.link == link]
        for request in dict.fromkeys(theirs):
            self._detach(request, now_s)

    def expire(self, now_s: float) -> None:
        """Cancel the requests whose resume window has passed."""
        while self._detached and (first := next(iter(self._detached.values()))).expires_s <= now_s:
            self._end(first)

    def attach(self, resume_id: str, link: int, samples: tuple[SubmittedSample, ...]) -> Attachment:
        """Make the gateway at the link the reader, also in place of another. Samples it does not
        name are cancelled; so is the whole request if it cannot continue from the reader's
        tokens."""
        request = self._by_id.get(resume_id)
        if request is None:
            return Attachment(is_held=False)
        replaced: tuple[SampleId, ...] = ()
        if request.has_reader:
            replaced = tuple(sample.reader for sample in request.samples.values())
        rests: dict[int, list[RequestUpdate]] = {}
        for had in samples:
            sample = request.samples.get(had.index)
            rest = None if sample is None else sample.rest(had)
            if rest is None:
                self._end(request)
                return Attachment(is_held=False, replaced=replaced)
            rests[had.index] = rest
        for index in request.samples.keys() - rests.keys():
            self._end_sample(request, request.samples[index])
        updates = [
            update
            for had in samples
            for update in self._move(request, SampleId(link, had.handle), had, rests[had.index])
        ]
        self._detached.pop(resume_id, None)
        request.has_reader = True
        return Attachment(True, tuple(updates), replaced)

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
        sample.sent_ids, sample.prompt_logprobs_sent = had.output_ids, had.prompt_logprobs_sent
        self._by_reader[reader] = request, sample
        return [replace(update, sample_id=reader) for update in rest]

    def _detach(self, request: _Request, now_s: float) -> None:
        # A client that has received nothing does not know that it can resume.
        is_known = any(sample.sent_ids or sample.updates for sample in request.samples.values())
        if not request.is_buffered or not is_known:
            self._end(request)
            return
        request.has_reader = False
        for sample in request.samples.values():
            self._by_reader.pop(sample.reader, None)
        request.expires_s = now_s + self._window_s
        self._detached[request.resume_id] = request
        while len(self._detached) > self._max_detached:
            self._end(next(iter(self._detached.values())))

    def _make_room(self) -> None:
        if self._detached:
            self._end(next(iter(self._detached.values())))
        else:
            self._stop_buffering(next(iter(self._by_id.values())))

    def _stop_buffering(self, request: _Request) -> None:
        """Cancel the request if detached; else let it run for its present reader only."""
        if not request.has_reader:
            self._end(request)
            return
        request.is_buffered = False
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
            self._detached.pop(request.resume_id, None)

    def _weigh(self, request: _Request, change: int) -> None:
        request.weight += change
        self._weight += change


def _weight_of(update: RequestUpdate) -> int:
    tops = (len(found.top) for found in (*update.logprobs, *update.prompt_logprobs))
    return 1 + len(update.token_ids) + sum(tops)


def _without(update: RequestUpdate, cut: int, prompt_cut: int) -> RequestUpdate:
    """The update without its first tokens and log-probabilities of the prompt."""
    return replace(
        update,
        token_ids=update.token_ids[cut:],
        num_accepted=max(update.num_accepted - cut, 0),
        num_drafted=max(update.num_drafted - cut, 0),
        num_verified=max(update.num_verified - cut, 0),
        logprobs=update.logprobs[cut:],
        prompt_logprobs=update.prompt_logprobs[prompt_cut:],
    )
