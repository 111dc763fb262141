"""Templates of strangers run in a process that is killed when they go too far."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.text.subprocess_pool import SubprocessTaskError
from outrider.text.templates import TemplateProcesses

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def templates() -> Iterator[TemplateProcesses]:
    made = TemplateProcesses(timeout_s=30.0)
    yield made
    made.close()


def _children() -> set[str]:
    own = Path(f"/proc/{os.getpid()}/task")
    return {child for task in own.iterdir() for child in (task / "children").read_text().split()}


def test_a_template_sees_messages_and_special_tokens(templates: TemplateProcesses) -> None:
    template = "{{ eos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert templates.render(template, MESSAGES, True, {"eos_token": "<e>"}) == "<e>hello>"
    assert templates.render(template, MESSAGES, False, {"eos_token": "<e>"}) == "<e>hello"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('not so') }}", "not so"),
        ("{% if %}", "Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 'a' * 10 ** 12 }}", "too much memory"),
        ("{{ 'a' * 2 ** 25 }}", "it writes 33554432 characters"),
    ],
)
def test_what_a_template_does_wrong_is_told(
    templates: TemplateProcesses, template: str, reason: str
) -> None:
    with pytest.raises(SubprocessTaskError, match=reason):
        templates.render(template, MESSAGES, True, {})
    assert templates.render("{{ 1 + 1 }}", MESSAGES, True, {}) == "2"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_a_template_without_an_end_is_killed(template: str) -> None:
    before = _children()
    with pytest.raises(SubprocessTaskError, match=r"it ran for more than 0\.3 s"):
        TemplateProcesses(timeout_s=0.3).render(template, MESSAGES, True, {})
    assert _children() == before


def test_no_secret_of_ours_is_in_the_childs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_SECRET", "planted")
    templates, before = TemplateProcesses(timeout_s=30.0), _children()
    templates.render("", MESSAGES, True, {})
    (child,) = _children() - before
    assert b"planted" not in Path(f"/proc/{child}/environ").read_bytes()
    templates.close()
    assert _children() == before, "no process is left behind"


def test_a_process_that_keeps_memory_of_a_template_is_not_kept() -> None:
    """A template that holds nothing large is rendered by the one before."""
    templates, before = TemplateProcesses(timeout_s=30.0), _children()
    for _ in range(3):
        templates.render("{{ 'a' * 1000 }}", MESSAGES, True, {})
    (child,) = _children() - before
    large = "{% set x = 'a' * 20000000 %}{{ x[:1] }}"  # worked out once, when it is compiled
    assert templates.render(large, MESSAGES, True, {}) == "a"
    assert child not in _children(), "it has memory that the next one may want"
    templates.close()
    assert _children() == before
