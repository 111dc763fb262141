"""Templates are rendered as `transformers` renders them, and refused as it refuses them."""

from __future__ import annotations

import datetime
import enum
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.text import rendering
from outrider.text.rendering import render

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Hällo\n  東京 🙂"},
    {"role": "assistant", "content": "Hi", "thinking": "hm"},
    {"role": "user", "content": "Bye", "name": "Zoë"},
]
VALUES = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": False, "more": {"a": [1, 2]}}
RENDERED = {
    "roles": "{% for m in messages %}<{{ m['role'] }}>{{ m.content | trim }}{{ eos_token }}"
    "{% endfor %}",
    "blocks and blanks": """
        {%- for m in messages %}
            {% if loop.first %}
    first
            {% endif %}
  {{ m.role }}
        {% endfor %}
        {% if add_generation_prompt %}assistant:{% endif %}
""",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ more | tojson(indent=2) }}"
    "{{ 'é<&' | tojson(ensure_ascii=True) }}"
    "{{ more | tojson(separators=(',', ':'), sort_keys=True) }}",
    "the year": "{{ strftime_now('%Y') }}",
    "a namespace": "{% set ns = namespace(found=false, n=1) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ ns.found }}",
    "a namespace of a mapping": "{% set ns = namespace({'a': 1}, self=2) %}{{ ns.a }}{{ ns.self }}",
    "a dict": "{{ dict(a=1) | tojson }}{{ dict.fromkeys(['x'], 0) | tojson }}",
    "what the model wrote": "{% for m in messages %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}{% endfor %}",
    "what is not there": "{{ tools is none }}{{ documents is none }}{{ nobody is defined }}"
    "{{ nobody }}",
    "values": "{{ bos_token }}{{ enable_thinking }}{{ more.a[1] }}",
    "a macro": "{% macro say(m) %}{{ m.role | upper }}{% endmacro %}{{ say(messages[0]) }}",
    "no line at the end": "x\n",
}
REFUSED = {
    "its own words": "{{ raise_exception('No system role.') }}",
    "a way out": "{{ ''.__class__.__mro__ }}",
    "a way out by a namespace": "{% set ns = namespace(__class__=1) %}",
    "a later one": "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "a list that is changed": "{{ messages.append(1) }}",
    "no template": "{% for %}",
    "what is not there": "{{ nobody.content }}",
}


def _theirs(template: str, messages: list[dict[str, Any]], is_asked: bool) -> str:
    given: dict[str, Any] = {"conversations": [messages], "chat_template": template, **VALUES}
    made: Any = render_jinja_template(add_generation_prompt=is_asked, **given)
    return str(made[0][0])


@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("template", RENDERED.values(), ids=RENDERED)
def test_templates_are_rendered_alike(template: str, is_asked: bool) -> None:
    assert render(template, MESSAGES, is_asked, VALUES) == _theirs(template, MESSAGES, is_asked)


@pytest.mark.parametrize("template", REFUSED.values(), ids=REFUSED)
def test_templates_are_refused_alike(template: str) -> None:
    with pytest.raises(jinja2.TemplateError) as theirs:
        _theirs(template, MESSAGES, True)
    with pytest.raises(type(theirs.value)) as ours:
        render(template, MESSAGES, True, VALUES)
    assert str(ours.value) == str(theirs.value) or "namespace" in template  # in our own words


def test_a_template_sees_no_more_than_the_text_of_a_message() -> None:
    class Word(str, enum.Enum):  # noqa: UP042 - a `StrEnum` is written as its text in any case
        HELLO = "hello"

    messages = [{"role": "user", "content": Word.HELLO}]
    template = "{{ messages[0].content }}{{ messages[0].content.name }}"
    assert render(template, messages, True, VALUES) == _theirs(template, messages, True) == "hello"


def test_the_time_is_that_of_the_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls(2031, 2, 3)

    template = "{{ strftime_now('%d %b %Y') }}"
    render(template, MESSAGES, True, VALUES)
    monkeypatch.setattr(rendering, "datetime", Clock)
    assert render(template, MESSAGES, True, VALUES) == "03 Feb 2031"


def test_a_sandbox_with_known_ways_out_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja2, "__version__", "3.1.5")
    rendering._environment.cache_clear()
    with pytest.raises(ImportError, match=r"need jinja2 3\.1\.6, this is 3\.1\.5"):
        render("never seen before", MESSAGES, True, VALUES)
    monkeypatch.undo()
    assert render("never seen before", MESSAGES, True, VALUES) == "never seen before"
