"""The messages of a stream, put together into one answer."""

from __future__ import annotations

from outrider.proto import generation_pb2


class WholeAnswer:
    """Takes every message of a request, in order; `answer` is what they add up to."""

    def __init__(self) -> None:
        self._answer = generation_pb2.GenerateOnceResponse()
        self._samples: dict[int, generation_pb2.GenerateResponse] = {}
        self._texts: dict[int, list[str]] = {}

    def take(self, response: generation_pb2.GenerateResponse) -> None:
        self._answer.request_id = response.request_id
        self._answer.prompt_logprobs.extend(response.prompt_logprobs)
        for name in ("start", "summary"):
            if response.HasField(name):
                getattr(self._answer, name).CopyFrom(getattr(response, name))
                response.ClearField(name)
        response.ClearField("prompt_logprobs")
        self._texts.setdefault(response.index, []).append(response.text)
        response.ClearField("text")
        if response.index in self._samples:
            self._samples[response.index].MergeFrom(response)
        else:
            self._samples[response.index] = response

    def answer(self) -> generation_pb2.GenerateOnceResponse:
        for index in sorted(self._samples):
            sample = self._samples[index]
            sample.text = "".join(self._texts[index])
            self._answer.samples.append(sample)
        return self._answer
