"""Which template a conversation goes through, and what is said when it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import tokenizer

from outrider.errors import ConfigError, RequestError
from outrider.text.chat import MAX_INLINE_CHARS, ChatTemplate, read_template
from outrider.text.templates import TemplateProcesses

HELLO = [{"role": "user", "content": "hello"}]
# Two nested walks over the text: fast for a line, and hours for a long one.
SLOW = (
    "{% for a in messages[0].content %}{% for b in messages[0].content %}{% endfor %}{% endfor %}ok"
)


@pytest.fixture
def processes() -> Iterator[TemplateProcesses]:
    made = TemplateProcesses(timeout_s=0.5)
    yield made
    made.close()


def test_the_models_template_is_used_unless_another_takes_its_place() -> None:
    own = "<{{ messages[0].content }}|{{ eos_token }}>"
    assert "<|im_start|>user\nhello<|im_end|>" in ChatTemplate(tokenizer()).render(HELLO)
    replaced = ChatTemplate(tokenizer(), own)
    assert replaced.render(HELLO) == f"<hello|{tokenizer().special_tokens_map['eos_token']}>"
    assert replaced.render(HELLO, "{{ messages[0].role }}") == "user"


def test_values_of_the_request_reach_the_template() -> None:
    chat = ChatTemplate(tokenizer(), "{% if enable_thinking %}hm{% else %}no{% endif %}")
    assert chat.render(HELLO) == "no"
    assert chat.render(HELLO, kwargs={"enable_thinking": True}) == "hm"


def test_what_the_tokenizer_says_cannot_be_replaced() -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs names 'eos_token'"):
        ChatTemplate(tokenizer()).render(HELLO, kwargs={"eos_token": "x"})


def test_a_template_that_refuses_is_quoted() -> None:
    chat = ChatTemplate(tokenizer(), "{{ raise_exception('System role not supported') }}")
    with pytest.raises(RequestError, match=r"refuses the conversation \(System role not suppo"):
        chat.render(HELLO)


def test_without_a_template_there_are_no_conversations() -> None:
    with pytest.raises(RequestError, match="the model has no chat template; give one"):
        ChatTemplate(None).render(HELLO)


def test_a_long_conversation_cannot_hold_up_the_servers_own_template(
    processes: TemplateProcesses,
) -> None:
    chat = ChatTemplate(tokenizer(), SLOW, processes)
    assert chat.render(HELLO) == "ok"
    with pytest.raises(RequestError, match=r"it ran for more than 0\.5 s"):
        chat.render([{"role": "user", "content": "a" * (MAX_INLINE_CHARS + 1)}])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{% for %}", "which is no chat template ("),
        (b"\xff\xfe", "which is no chat template ("),
        (b"a" * (2**20 + 1), "it has more than 1048576 bytes"),
        (None, "which cannot be read (No such file or directory); name a Jinja file."),
    ],
)
def test_a_file_that_is_no_template_is_one_sentence(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(problem)) as failure:
        read_template(str(path))
    assert str(failure.value).startswith(f"server.chat_template is '{path}', which ")


def test_what_a_template_says_is_told_in_one_short_line(processes: TemplateProcesses) -> None:
    chat = ChatTemplate(tokenizer(), processes=processes)
    words = "a\\n\\x00b\\ud800" + 400 * "c"
    with pytest.raises(RequestError, match=r"\(a b c+\); give messages") as refused:
        chat.render(HELLO, f"{{{{ raise_exception('{words}') }}}}")
    assert str(refused.value).isprintable() and len(str(refused.value)) < 500


def test_a_template_of_a_request_has_a_limit(processes: TemplateProcesses) -> None:
    large = "{# " + "." * 200_000 + " #}"
    with pytest.raises(RequestError, match=r"200006 characters; one that comes .* may have 131072"):
        ChatTemplate(tokenizer(), processes=processes).render(HELLO, large)
    assert ChatTemplate(tokenizer(), large, processes).render(HELLO) == ""
