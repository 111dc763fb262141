"""A server's terminal output: events of start and run, and commands to paste."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider import __version__
from outrider.cli.speculation_text import speculation_sentence
from outrider.cli.visible import SafeConsole
from outrider.config import EngineConfig, ServerConfig
from outrider.requirements import install_command

if TYPE_CHECKING:
    from outrider.cluster.events import Event
    from outrider.cluster.serve_callbacks import Addresses
    from outrider.links.speculation import SpeculationStatus

_QUESTION = "The capital of France is"
_CHAT = "In one sentence, what is photosynthesis?"
_OWN_AUTHORITY = (
    "If the certificate is from an authority of your own, add --tls-ca FILE, and --cacert FILE for "
    "curl."
)


class _PatientConsole(SafeConsole):
    """Goes quiet once stderr cannot be written: the server must go on."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            self.quiet = True

    def on_broken_pipe(self) -> None:
        """Overrides rich, which would exit the process."""
        self.quiet = True


class Terminal:
    """Prints the server's events to stderr, with the seconds since its start."""

    def __init__(self, config: EngineConfig) -> None:
        self._console = _PatientConsole(stderr=True, highlight=False, soft_wrap=True)
        self._config = config
        self._start_s = time.monotonic()

    def greet(self) -> None:
        config = self._config
        text = f"outrider {__version__}: {config.target.model}"
        drafter = config.draft.model or config.head.model
        if drafter is not None:
            text += f", drafted for by {drafter}"
        self._console.print(text, style="bold", markup=False)

    def say(self, event: Event) -> None:
        from outrider.cluster.events import EventKind

        styles = {
            EventKind.TROUBLE: "yellow",
            EventKind.REPAIR: "green",
            EventKind.LOG: "dim",
            EventKind.STAGE: "",
        }
        if event.kind is EventKind.LOG:
            self._console.print(f"           {event.text}", style="dim", markup=False)
            return
        seconds = time.monotonic() - self._start_s
        self._console.print(f"{seconds:7.1f} s  ", style="dim", end="")
        self._console.print(event.text, style=styles[event.kind], markup=False)

    def show_ready(
        self, addresses: Addresses, speculation: SpeculationStatus | None, settled: EngineConfig
    ) -> None:
        seconds = time.monotonic() - self._start_s
        self._console.print(f"ready in {seconds:.1f} s", style="bold green")
        if speculation is not None:
            reason = depth_reason(self._config)
            sentence = speculation_sentence(speculation, settled, reason)
            self._console.print(sentence, markup=False)
        if not addresses.http:
            self._console.print("\nGateways that connect serve it. Ctrl-C stops it.")
            return
        page = page_url(addresses, self._config.server)
        if page is not None:
            self._console.print(f"\nOpen {page} in a browser, or try it in another terminal:\n")
        else:
            self._console.print("\nTry it in another terminal:\n")
        for command in commands_to_paste(addresses, self._config):
            self._console.print(f"    {command}", style="cyan", markup=False)
        if self._config.server.tls_cert is not None:
            self._console.print(f"\n{_OWN_AUTHORITY}", markup=False)
        self._console.print("\nCtrl-C stops it.")


def depth_reason(config: EngineConfig) -> str:
    """Where the depth bound comes from."""
    if config.speculation.num_speculative_tokens is not None:
        return "as speculation.num_speculative_tokens says"
    return "the default of this device; --num-speculative-tokens sets another"


def page_url(addresses: Addresses, server: ServerConfig) -> str | None:
    """URL of the page, if there is one."""
    return f"{_url(addresses, server)}/" if server.page else None


def commands_to_paste(addresses: Addresses, config: EngineConfig) -> list[str]:
    """curl, OpenAI's client, a chat and the status, for a server at these addresses."""
    from outrider.client import DEFAULT_SERVER

    python, outrider = _program("python", sys.executable), _program("outrider", sys.argv[0])
    if Path(sys.argv[0]).name != "outrider":
        outrider = f"{python} -m outrider"
    url, server = _url(addresses, config.server), _nearby(addresses.grpc)
    if config.server.tls_cert is not None:
        server = f"https://{server}"
    option = "" if server == DEFAULT_SERVER else f" --server {server}"
    name = next(iter(config.server.model_names), config.target.model)
    needs_key = config.server.api_key is not None or config.server.api_keys_file is not None
    header = ' -H "Authorization: Bearer $OUTRIDER_API_KEY"' if needs_key else ""
    body = json.dumps({"model": name, "prompt": _QUESTION, "max_tokens": 8})
    key = 'os.environ["OUTRIDER_API_KEY"]' if needs_key else '"none"'
    messages = f'[{{"role": "user", "content": "{_CHAT}"}}]'
    # openai is not a dependency of the server, but the pasted command should work.
    install = "" if find_spec("openai") else f"{install_command(['openai'], '-q')}; "
    return [
        f"curl {url}/v1/completions{header} -H 'Content-Type: application/json' -d '{body}'",
        f"{install}{python} -c '{'import os; ' if needs_key else ''}from openai import OpenAI; "
        f'print(OpenAI(base_url="{url}/v1", api_key={key}).chat.completions'
        f".create(model={json.dumps(name)}, messages={messages}).choices[0].message.content)'",
        f"{outrider} chat{option}",
        f"{outrider} status{option}",
    ]


def _url(addresses: Addresses, server: ServerConfig) -> str:
    scheme = "http" if server.tls_cert is None else "https"
    return f"{scheme}://{_nearby(addresses.http)}"


def _nearby(address: str) -> str:
    """The address as reached from this host."""
    host, _, port = address.rpartition(":")
    is_here = host in ("127.0.0.1", "0.0.0.0", "[::]", "[::1]")
    return f"localhost:{port}" if is_here else address


def _program(name: str, path: str) -> str:
    """How to call a program from this folder: by name if PATH finds it."""
    found = shutil.which(name)
    if found is not None and os.path.realpath(found) == os.path.realpath(path):
        return name
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
