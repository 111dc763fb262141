"""`LLM`: offline generation with vLLM's interface."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.engine.build import build_engine, chosen_config, models_of
from outrider.engine.engine import Engine
from outrider.errors import EngineDeadError, RequestError
from outrider.progress import ProgressLines, ProgressSpinner
from outrider.scheduler.params import SamplingParams
from outrider.text.input_processor import PreparedRequest
from outrider.text.messages import Conversation, Message
from outrider.text.outputs import RequestOutput
from outrider.text.plain_tokenizer import PlainTokenizer
from outrider.text.prompts import Prompt, is_one, matched
from outrider.text.tokenizer import of_transformers

_MIN_FOR_PROGRESS_BAR = 8  # prompts


class LLM:
    """A target, optionally with a draft. Options are those of `EngineConfig`, under their own or
    vLLM's names; see `EngineConfig.from_kwargs`."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = chosen_config("LLM", model, options.pop("config", None), options)
        with self._spinner(f"loading {models_of(self.config)}"):
            self.engine = Engine(build_engine(self.config))
        load = self.engine.built.loop.scheduler.control.load
        load.is_complete = True  # each call brings all its requests
        self._ids = itertools.count()
        self._end = weakref.finalize(self, self.engine.close)

    def close(self) -> None:
        """End the models' processes, if any; also called when the object is collected."""
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def get_tokenizer(self) -> Any:
        """The target's tokenizer, of `transformers`; None if it has none."""
        own = self.engine.built.tokenizer
        return of_transformers(own) if isinstance(own, PlainTokenizer) else own

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests without any: the checkpoint's generation_config.json, unless
        `generation_config` is "none", over the defaults of `SamplingParams`."""
        return self.engine.params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        **overrides: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt; results are in the order of the prompts.

        Parameters of `SamplingParams` may also be given by name, as to `Client`. Without
        `sampling_params`, the others are the checkpoint's defaults
        (`get_default_sampling_params`). All requests are checked before the first runs.
        """
        self._check_open()
        listed: list[Any] = [prompts] if is_one(prompts) else list(prompts)
        params = [self._params(own, overrides) for own in matched(sampling_params, len(listed))]
        prepared = [
            self.engine.input_processor.prepare(
                str(next(self._ids)), prompt, own, priority=priority
            )
            for prompt, own in zip(listed, params, strict=True)
        ]
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **overrides: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        self._check_open()
        conversations: Sequence[Any] = messages if _are_several(messages) else [messages]
        prompts: list[Any] = [
            Conversation(each, chat_template, add_generation_prompt) for each in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **overrides)

    def _params(self, own: SamplingParams | None, overrides: dict[str, Any]) -> SamplingParams:
        if own is None:
            return self.engine.params(overrides)
        return dataclasses.replace(own, **overrides) if overrides else own

    def _check_open(self) -> None:
        if not self._end.alive:
            raise EngineDeadError("this LLM was closed; make another with LLM(...).")

    def _spinner(self, what: str) -> ProgressSpinner:
        """Reports long loading, if the log level is info or lower."""
        is_shown = self.config.log_level in ("debug", "info")
        return ProgressSpinner(Console(stderr=True, quiet=not is_shown), what, spins=False)

    def _run(self, prepared: Sequence[PreparedRequest], use_progress: bool) -> list[RequestOutput]:
        try:
            outputs = [self.engine.add_prepared(each) for each in prepared]
            self._step_until_done(len(prepared), use_progress)
            for output in outputs:
                output.raise_if_failed()
        except BaseException:
            for each in prepared:  # a failed or interrupted call leaves no request running
                self.engine.cancel(each.request_id)
            raise
        return outputs

    def _step_until_done(self, num_requests: int, use_progress: bool) -> None:
        console = Console(stderr=True, quiet=not use_progress)
        lines = ProgressLines(lambda line: console.print(line, highlight=False))
        is_terminal = console.is_terminal  # read once: it is slow beside a step
        shown = use_progress and num_requests >= _MIN_FOR_PROGRESS_BAR and is_terminal
        columns = (
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeRemainingColumn(),
        )
        with (
            interrupts_between_steps() as check_interrupt,
            Progress(*columns, console=console, disable=not shown) as progress,
        ):
            task = progress.add_task("", total=num_requests, tokens=0)
            num_tokens = num_ended = 0
            while self.engine.has_work:
                check_interrupt()
                deltas = self.engine.step()
                num_tokens += sum(len(delta.token_ids) for delta in deltas)
                ended = {d.request_id for d in deltas if d.finish_reason and d.output.finished}
                num_ended += len(ended)
                if shown:
                    progress.update(task, completed=num_ended, tokens=num_tokens)
                if not is_terminal:
                    lines.report(
                        f"generating: {num_ended} of {num_requests} done, {num_tokens} tokens"
                    )


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Yields a function to call between steps, which raises if Ctrl-C was pressed meanwhile.

    An interrupt inside a step would leave a plan without its verdict and the engine unusable. A
    second Ctrl-C interrupts at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # signals arrive in the main thread only
        return
    pressed = False

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def _are_several(messages: Any) -> bool:
    """Whether these are conversations rather than the messages of one."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f"messages is {messages!r}; it must be a list of {{'role': ..., 'content': ...}}."
        )
    return bool(messages) and all(isinstance(each, list | tuple) for each in messages)
