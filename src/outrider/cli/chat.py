"""`outrider chat`: a conversation with a running server, in the terminal or through a pipe."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from outrider.cli.colour import coloured
from outrider.cli.connecting import (
    ApiKeyOption,
    ClientCertOption,
    ServerOption,
    TlsCaOption,
    connect,
)
from outrider.cli.sampling import TemperatureOption, TopPOption, given_params
from outrider.client import DEFAULT_SERVER, Client, Completion, Stream
from outrider.errors import OutriderError, RequestError
from outrider.progress import ProgressSpinner

_PROMPT = "> "
_HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer."

app = typer.Typer(add_completion=False)


@app.command()
def chat(
    server: ServerOption = DEFAULT_SERVER,
    system: Annotated[
        str | None, typer.Option(help="System message of the conversation.", show_default=False)
    ] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 512,
    seed: Annotated[
        int | None, typer.Option(help="Seed of every answer; drawn if not given.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Proposer: draft, ngram or off. Default: the server's."),
    ] = None,
    depth: Annotated[
        int | None, typer.Option("--depth", "-k", help="Maximum tokens drafted per round.")
    ] = None,
    fix_depth: Annotated[
        bool, typer.Option("--fix-depth", help="Draft exactly --depth tokens, whatever the policy.")
    ] = False,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Talk to a server; accepted drafts in green, the target's own tokens in magenta."""
    params = given_params(
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        seed=seed,
        speculation=method,
        num_speculative_tokens=depth,
        fix_depth=fix_depth or None,
    )
    with connect(server, api_key, tls_ca, client_cert) as client:
        conversation = _Conversation(client, params, system)
        if sys.stdin.isatty():
            conversation.talk()
        else:
            conversation.answer(_read_stdin())


def _read_stdin() -> str:
    try:
        text = sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError:
        raise RequestError("standard input is not text; give the message in UTF-8.") from None
    if not text.strip():
        raise RequestError("standard input is empty; pipe a message into outrider chat.")
    return text


class _Conversation:
    """The conversation so far, and its consoles."""

    def __init__(self, client: Client, params: dict[str, Any], system: str | None) -> None:
        from outrider.cli.visible import SafeConsole

        self._stdout = SafeConsole(highlight=False)
        self._stderr = SafeConsole(stderr=True, highlight=False)
        self._client = client
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    def talk(self) -> None:
        """Run until the user leaves."""
        import readline  # noqa: F401 - adds history and key bindings to `input`

        status = self._client.status()
        self._stderr.print(f"{status.model} at {self._client.address}. {_HELP}", style="dim")
        while True:
            try:
                line = input(_PROMPT).strip()
            except KeyboardInterrupt:
                self._stdout.print()
                continue
            except EOFError:
                self._stdout.print()
                return
            if line == "/quit":
                return
            if line == "/reset":
                self._messages = list(self._opening)
            elif line.startswith("/"):
                self._stderr.print(f"unknown command {line}. {_HELP}", style="dim")
            elif line:
                self._answer_or_explain(line)

    def _answer_or_explain(self, line: str) -> None:
        try:
            self.answer(line)
        except OutriderError as error:
            self._stderr.print(f"error: {error}", style="red", markup=False)

    def answer(self, line: str) -> None:
        """Stream the answer. Keeps both turns even if the answer was interrupted."""
        turn = {"role": "user", "content": line}
        stream = self._client.chat_stream(
            [*self._messages, turn], want_text_spans=self._has_colours, **self._params
        )
        with stream:
            is_whole = self._show(stream)
        text = stream.completion.text
        if text or is_whole:
            self._messages += [turn, {"role": "assistant", "content": text}]
        if is_whole:
            self._stderr.print(_statistics(stream.completion), style="dim")

    def _show(self, stream: Stream) -> bool:
        """Write the text as it streams; whether it completed."""
        from outrider.cli.visible import visible_on

        file = self._stdout.file
        waiting = ProgressSpinner(self._stderr, "waiting for the server")
        waiting.start()
        try:
            for chunk in stream:
                waiting.stop()
                spans = [(size, origin != "target") for size, origin in chunk.spans]
                text = chunk.text
                file.write(coloured(text, spans) if spans else visible_on(file, text))
                file.flush()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            return False
        finally:
            waiting.stop()
            file.write("\n")
            file.flush()
        return True

    @property
    def _has_colours(self) -> bool:
        return self._stdout.color_system is not None and not self._stdout.no_color


def _statistics(completion: Completion) -> str:
    usage, timings, record = completion.usage, completion.timings, completion.speculation
    rate = usage.completion_tokens / timings.total_s if timings.total_s else 0.0
    parts = [
        f"{usage.completion_tokens} tokens",
        f"{rate:.1f} tokens/s",
        f"first after {timings.time_to_first_token_s:.2f} s",
        f"{record.block_efficiency:.2f} tokens a round",
    ]
    if record.drafted_tokens:
        parts.append(f"{record.acceptance_rate:.0%} of drafts accepted")
    parts.append(f"seed {completion.seed}")
    if completion.resubmissions:
        parts.append(f"resumed {completion.resubmissions} times")
    return ", ".join(parts)
