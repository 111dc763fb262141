"""`LLM`: offline generation with the interface a vLLM user knows."""

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
from outrider.progress import AtWork, Lines
from outrider.scheduler.params import SamplingParams
from outrider.text.front_door import Message, PreparedRequest, Prompt
from outrider.text.outputs import RequestOutput
from outrider.text.plain_tokenizer import PlainTokenizer
from outrider.text.prompts import is_one, matched
from outrider.text.tokenizer import of_transformers

_MANY = 8  # prompts from which a progress bar is worth its lines


class LLM:
    """A target, optionally a draft, and `generate`. Options are those of `EngineConfig`, under
    their own or vLLM's names; see `EngineConfig.from_kwargs`."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = chosen_config("LLM", model, options.pop("config", None), options)
        with self._telling(f"loading {models_of(self.config)}"):
            self.engine = Engine(build_engine(self.config))
        self._ids = itertools.count()
        self._end = weakref.finalize(self, self.engine.close)

    def close(self) -> None:
        """End the processes of the models, if they have any; happens by itself at the end."""
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
        """That of the target, a tokenizer of `transformers`; None if it has none."""
        own = self.engine.built.tokenizer
        return of_transformers(own) if isinstance(own, PlainTokenizer) else own

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without any get: the checkpoint's generation_config.json, unless
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

        Parameters of `SamplingParams` may be given by name as well, as to `Client`. Without
        `sampling_params`, those that are not given are the checkpoint's defaults
        (`get_default_sampling_params`). All requests are checked before the first runs: a bad one
        is reported and nothing is lost.
        """
        self._check_open()
        listed: list[Any] = [prompts] if is_one(prompts) else list(prompts)
        params = [self._params(own, overrides) for own in matched(sampling_params, len(listed))]
        prepared = [
            self.engine.front_door.prepare(str(next(self._ids)), prompt, own, priority=priority)
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
        """Answer one conversation, or each of several, through the model's chat template."""
        self._check_open()
        conversations: Sequence[Any] = messages if _are_several(messages) else [messages]
        prompts: list[Prompt] = [
            self.engine.front_door.chat_prompt(conversation, chat_template, add_generation_prompt)
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **overrides)

    def _params(self, own: SamplingParams | None, overrides: dict[str, Any]) -> SamplingParams:
        if own is None:
            return self.engine.params(overrides)
        return dataclasses.replace(own, **overrides) if overrides else own

    def _check_open(self) -> None:
        if not self._end.alive:
            raise EngineDeadError("this LLM was closed; make another with LLM(...).")

    def _telling(self, what: str) -> AtWork:
        """Lines about long loading, for whoever wants to hear of more than warnings."""
        is_wanted = self.config.log_level in ("debug", "info")
        return AtWork(Console(stderr=True, quiet=not is_wanted), what, spins=False)

    def _run(self, prepared: Sequence[PreparedRequest], use_progress: bool) -> list[RequestOutput]:
        try:
            outputs = [self.engine.add_prepared(each) for each in prepared]
            self._step_until_done(len(prepared), use_progress)
            for output in outputs:
                output.raise_if_failed()
        except BaseException:
            for each in prepared:  # a failed or interrupted call leaves nothing running behind it
                self.engine.cancel(each.request_id)
            raise
        return outputs

    def _step_until_done(self, num_requests: int, use_progress: bool) -> None:
        console = Console(stderr=True, quiet=not use_progress)
        lines = Lines(lambda line: console.print(line, highlight=False))
        is_terminal = console.is_terminal  # asked once: it takes longer than much of a step
        shown = use_progress and num_requests >= _MANY and is_terminal
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
                    lines.tell(
                        f"generating: {num_ended} of {num_requests} done, {num_tokens} tokens"
                    )


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Yields a function to call between steps, which raises if Ctrl-C was pressed meanwhile.

    In the middle of a step it would leave a plan without its verdict, and the engine could not go
    on. Whoever does not want to wait presses it twice.
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
