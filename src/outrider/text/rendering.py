"""Renders chat templates as `transformers` does, without its slow import.

Templates are untrusted programs, from a model or a client. They run in Jinja's sandbox and see text
and plain values only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MIN_JINJA = (3, 1, 6)  # earlier sandboxes have known escapes
MAX_TEXT_CHARS = 16 * 2**20  # of a subprocess's answer
# Names of a message's reasoning; the one that most templates read first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    values: Mapping[str, Any],
) -> str:
    """`values` are further variables of the template. Raises whatever the template raises."""
    own = {
        "messages": [_with_reasoning(_plain(message)) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    return compiled(template).render(own | dict(values))


def answer(question: Mapping[str, Any]) -> str:
    """The same as a subprocess's task."""
    text = render(**question)
    if len(text) > MAX_TEXT_CHARS:
        raise ValueError(f"it writes {len(text)} characters, above {MAX_TEXT_CHARS}")
    return text


@lru_cache(maxsize=32)
def compiled(template: str) -> jinja2.Template:
    """Raises `jinja2.TemplateError` if it does not compile."""
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    release = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdecimal())
    if release < MIN_JINJA:
        minimum = ".".join(map(str, MIN_JINJA))
        raise ImportError(f"chat templates need jinja2 {minimum}, this is {jinja2.__version__}")
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Attributes,
    }
    return made


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert subclasses of str to str, so that templates cannot call their methods."""
    return {
        name: str.__str__(value) if isinstance(value, str) else value
        for name, value in message.items()
    }


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[n] for n in _REASONING if message.get(n) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape `<` and `&` for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


class _Generation(Extension):
    """`{% generation %}` marks the model's output for training; here it is plain text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without class attributes, through which a template could escape the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Attributes(Namespace):
    """Jinja's `namespace` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805 - `self` may be one of the names
        self, *given = args
        names = dict(*given, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace may have no name that begins with an underscore, and {name!r} does"
        )
