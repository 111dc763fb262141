"""`python -m outrider.cli.reference`: generates the page of all settings from their types.

Flags are those of `outrider serve`; other settings take `--set`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import typer

from outrider.cli import serve
from outrider.config import SECTIONS, settings
from outrider.config.kwargs import PATHS
from outrider.config.rules import Setting

_HEAD = """\
# Configuration

Every setting, made from the types that check them: `make docs-reference` writes this page, and a
test keeps it true.

A setting has one path, and four ways to get a value. Of what is given in several, the first of
these holds:

1. a flag of the command, where it has one (`outrider serve --port 9000`), or
   `--set server.port=9000`, which takes any path
2. a variable of the environment (`OUTRIDER_SERVER_PORT=9000`)
3. a file (`--config outrider.yaml`, or `OUTRIDER_CONFIG`), in YAML, with the sections below as its
   keys
4. the default

In Python, `LLM(...)`, `AsyncEngine(...)` and `EngineConfig.from_kwargs(...)` take the names in the
last column, and [vLLM's](from-vllm.md) where they differ.

```console
$ outrider config init outrider.yaml     # a file with every setting, explained, at its default
$ outrider config check outrider.yaml    # everything that is wrong with it, with its line
$ outrider config show                   # what holds now, and where each value came from
```

A value of a wrong kind, an unknown name, and values that do not go together are refused before
anything starts, with the place to change. Lists have commas between their parts in flags and
variables. Where a setting may be unset, `none` (or an empty variable) unsets it.

Four variables are no settings: `OUTRIDER_CONFIG` names the file, `OUTRIDER_CACHE` the folder of
converted weights and compiled kernels (`~/.cache/outrider`), `OUTRIDER_SECRET` is what the
processes of one server prove to each other, `OUTRIDER_SERVER` the server that `outrider chat`,
`status` and other clients talk to.
"""
_COLUMNS = ("setting", "default", "must be", "meaning", "flag", "variable", "in Python")
_WHOLE = "whole"


def page() -> str:
    """The expected page."""
    flags, parts = serve_flags(), [_HEAD]
    for section in [*SECTIONS, _WHOLE]:
        of_section = [s for s in settings().values() if _section_of(s) == section]
        about = SECTIONS[section].__doc__ if section != _WHOLE else "Settings of no section."
        rows = [_row(each, flags) for each in of_section]
        title = f"`{section}`" if section != _WHOLE else "The whole"
        parts.append("\n".join([f"## {title}", "", str(about), "", *_table(rows)]) + "\n")
    return "\n".join(parts)


def serve_flags() -> Mapping[str, str]:
    """The flag of `outrider serve` for each path that has one."""
    found: dict[str, str] = {}
    for parameter in typer.main.get_command(serve.app).params:
        for name in parameter.opts:
            path = PATHS.get(name.removeprefix("--").replace("-", "_"))
            if path is not None and name.startswith("--"):
                found.setdefault(path, name)
    return found


def _section_of(setting: Setting) -> str:
    return setting.path.rpartition(".")[0] or _WHOLE


def _row(setting: Setting, flags: Mapping[str, str]) -> tuple[str, ...]:
    names = [name for name, path in PATHS.items() if path == setting.path]
    return (
        f"`{setting.path}`",
        _default(setting),
        setting.rule.expected,
        setting.doc,
        f"`{flags[setting.path]}`" if setting.path in flags else "",
        ", ".join(f"`{name}`" for name in setting.env_names),
        f"`{names[0]}`",
    )


def _default(setting: Setting) -> str:
    if setting.default is None:
        return "unset"
    if setting.default == ():
        return "none"
    value = setting.default if isinstance(setting.default, str) else json.dumps(setting.default)
    return f"`{value}`"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


if __name__ == "__main__":
    print(page(), end="")
