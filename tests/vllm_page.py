"""vLLM's options and public lines of `vllm serve`, and the tables of `docs/from-vllm.md` that are
made of them; `python tests/vllm_page.py` writes the page anew."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import typer
import yaml

from outrider.cli import GlobalOptions
from outrider.cli import serve as serve_command
from outrider.cli.vllm_options import translation_of
from outrider.config import EngineConfig
from outrider.config.foreign import IGNORED, REFUSED, RefusedArgument
from outrider.config.foreign_command import COMMAND_IGNORED, COMMAND_PATHS, COMMAND_REFUSED
from outrider.config.foreign_speculation import (
    SPECULATIVE_IGNORED,
    SPECULATIVE_PATHS,
    SPECULATIVE_REFUSED,
)
from outrider.config.kwargs import PATHS
from outrider.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "from-vllm.md"
DATA = ROOT / "tests" / "data" / "vllm"
# Of older versions; those of today are in the data.
_OLD = (
    *("device", "speculative_model", "speculative_draft_tensor_parallel_size"),
    *("num_speculative_tokens", "ngram_prompt_lookup_min", "ngram_prompt_lookup_max"),
)
_BEGIN = "<!-- {name}: made by `make docs-vllm` -->"
_END = "<!-- end of {name} -->"


@functools.cache
def vllm_options() -> dict[str, Any]:
    """What `vllm serve` takes: `takes` by option, `short` forms by themselves."""
    found: dict[str, Any] = json.loads((DATA / "serve_options.json").read_text())
    return found


@dataclass(frozen=True, slots=True)
class Line:
    """One of `vllm serve`, as it stands where it was found."""

    source: str
    text: str

    @property
    def args(self) -> list[str]:
        """What a shell makes of it, without `serve` itself."""
        script = f'vllm() {{ printf "%s\\0" "$@"; }}\n{self.text}'
        shell = ["bash", "--noprofile", "--norc", "-c", script]
        said = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=30)
        command, *args = said.stdout.split("\0")[:-1]
        assert command == "serve"
        return args


@functools.cache
def lines() -> tuple[Line, ...]:
    return tuple(
        Line(each["source"], each["line"].strip())
        for each in yaml.safe_load((DATA / "lines.yaml").read_text())
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `outrider serve` makes of a command line, up to where it would look for the model."""

    config: EngineConfig | None  # None where it was refused
    ignored: tuple[str, ...]
    refused: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Those that are not the defaults, but for the model, and not what follows from others."""
        if self.config is None:
            return {}
        plain = EngineConfig.from_kwargs(model=self.config.target.model).to_settings()
        values = self.config.to_settings().items()
        derived = [(each, None) for each in ("speculation.method",)]  # of a draft that is named
        changed = ((p, v) for p, v in values if v != plain[p] and p != "log_level")
        return {p: v for p, v in changed if (p, v) not in derived}


class _Reached(Exception):
    """The command would start the server now."""


def judge(args: list[str]) -> Verdict:
    """By the command itself; nothing is started."""
    reached: list[EngineConfig] = []

    def stop(config: EngineConfig, *rest: Any, **options: Any) -> NoReturn:
        reached.append(config)
        raise _Reached

    command = typer.main.get_command(serve_command.app)
    options = GlobalOptions(log_level="error")
    ignored: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    with patch.object(serve_command, "run_server", stop):
        try:
            with command.make_context("serve", list(args), obj=options) as ctx:
                ignored = tuple(translation_of(ctx).ignored)
                command.invoke(ctx)
        except _Reached:
            pass
        except ConfigError as error:
            refused = tuple(str(error).splitlines())
    return Verdict(reached[0] if reached else None, ignored, refused)


def tables() -> dict[str, str]:
    """Every table of the page that is made, by its name there."""
    return {
        "lines": _lines_table(),
        "accepted": _accepted_table(),
        "ignored": _table(("because", "arguments"), _grouped(IGNORED)),
        "refused": _table(("argument", "passes", "otherwise"), _refused_rows(REFUSED, _argument)),
        "command": _command_table(),
        "speculative": _speculative_table(),
    }


def written_tables(page: str) -> dict[str, str]:
    return {name: _between(name, page) for name in tables()}


def page_with(made: Mapping[str, str], page: str) -> str:
    for name, table in made.items():
        begin, end = _BEGIN.format(name=name), _END.format(name=name)
        page = page.replace(f"{begin}\n{_between(name, page)}{end}", f"{begin}\n{table}{end}")
    return page


def _between(name: str, page: str) -> str:
    return page.split(_BEGIN.format(name=name) + "\n")[1].split(_END.format(name=name))[0]


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    made = [list(head), ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(each) for each in row)} |\n" for row in made)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def _argument(name: str) -> str:
    return f"`{name}`"


def _option(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def _grouped(reasons: Mapping[str, str], write: Any = _argument) -> list[list[str]]:
    """Names with the same reason in one row."""
    rows: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        rows.setdefault(reason, []).append(write(name))
    return [[reason, ", ".join(names)] for reason, names in rows.items()]


def _refused_rows(refused: Mapping[str, RefusedArgument], write: Any) -> list[list[str]]:
    rows: dict[tuple[str, str], list[str]] = {}
    for name, each in refused.items():
        passing = ", ".join(f"`{value!r}`" for value in each.without_effect)
        rows.setdefault((passing, each.reason), []).append(write(name))
    return [[", ".join(names), passing, reason] for (passing, reason), names in rows.items()]


def accepted() -> dict[str, str]:
    """The setting of every argument of vLLM's that has one."""
    names = {option[2:].replace("-", "_") for option in vllm_options()["takes"]}
    return {name: path for name, path in PATHS.items() if name in names or name in _OLD}


def _accepted_table() -> str:
    return _table(
        ("argument", "setting"), [[f"`{name}`", f"`{path}`"] for name, path in accepted().items()]
    )


def _command_table() -> str:
    rows = [[_option(name), f"`{path}`"] for name, path in COMMAND_PATHS.items()]
    rows += [[names, f"ignored: {reason}"] for reason, names in _grouped(COMMAND_IGNORED, _option)]
    rows += [
        [names, f"refused{f' unless {passes}' if passes else ''}: {reason.rstrip('.')}"]
        for names, passes, reason in _refused_rows(COMMAND_REFUSED, _option)
    ]
    return _table(("option", "here"), rows)


def _speculative_table() -> str:
    rows = [[f"`{key}`", f"`{path}`"] for key, path in SPECULATIVE_PATHS.items()]
    rows += [[names, f"ignored: {reason}"] for reason, names in _grouped(SPECULATIVE_IGNORED)]
    rows += [
        [names, f"refused{f' unless {passes}' if passes else ''}: {reason.rstrip('.')}"]
        for names, passes, reason in _refused_rows(SPECULATIVE_REFUSED, _argument)
    ]
    return _table(("key", "here"), rows)


def _lines_table() -> str:
    rows = []
    for line in lines():
        verdict = judge(line.args)
        text = " ".join(line.text.replace("\\\n", " ").split())
        settings = ", ".join(_setting(path, value) for path, value in verdict.settings.items())
        ignored = ", ".join(f"`{option}`" for option in verdict.ignored)
        rows.append(
            [
                f"`{text}`<br>({line.source})",
                "no" if verdict.refused else "yes",
                settings,
                ignored,
                "<br>".join(verdict.refused),
            ]
        )
    head = ("line", "starts", "settings that are not the defaults", "ignored", "refused")
    return _table(head, rows)


def _setting(path: str, value: Any) -> str:
    if path == "server.api_key":
        return f"`{path}`"
    return f"`{path}={json.dumps(value) if not isinstance(value, str) else value}`"


if __name__ == "__main__":
    PAGE.write_text(page_with(tables(), PAGE.read_text()))
