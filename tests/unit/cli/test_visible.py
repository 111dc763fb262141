"""Control characters in what a model or a server says do not act on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
from pathlib import Path

import pytest
from fake_engine import fake_service, tokenizer

from outrider.cli import main
from outrider.cli.colour import coloured
from outrider.cli.visible import SafeConsole, visible, visible_on

TITLE = "\x1b]0;owned\x07 \x9b31m red \r over\x00\x7f"
SHOWN = r"\x1b]0;owned\x07 \x9b31m red \x0d over\x00\x7f"
OWN_STYLES = re.compile(r"\x1b\[[0-9;]*m")


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_controls_are_shown_and_lines_and_tabs_stay() -> None:
    assert visible(TITLE) == SHOWN
    assert visible("a\tb\nü 東京 🙂") == "a\tb\nü 東京 🙂"


def test_pieces_of_a_sequence_are_harmless_one_by_one() -> None:
    assert "".join(visible(each) for each in TITLE) == SHOWN


def test_a_program_gets_what_was_said() -> None:
    assert visible_on(io.StringIO(), TITLE) == TITLE
    assert visible_on(FakeTerminal(), TITLE) == SHOWN


def test_coloured_text_keeps_its_spans() -> None:
    shown = coloured(TITLE, [(3, True), (5, False)])
    assert OWN_STYLES.sub("", shown) == SHOWN and shown != SHOWN


@pytest.mark.parametrize("is_table", [False, True])
def test_a_console_writes_its_own_styles_only(is_table: bool) -> None:
    from rich.table import Table

    file = FakeTerminal()
    console = SafeConsole(file=file, force_terminal=True, width=200, highlight=False)
    table = Table("name")
    table.add_row(TITLE)
    console.print(table if is_table else TITLE, style="red", markup=False)
    written = file.getvalue()
    assert r"\x1b]0;owned" in written
    assert not set(OWN_STYLES.sub("", written)) & {"\x1b", "\x9b", "\x07", "\r"}
    assert OWN_STYLES.search(written)


def test_a_chat_on_a_terminal_shows_what_the_model_would_have_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*tokenizer().encode("\x1b]0;owned\x07 said", add_special_tokens=False), 2]
    starts: dict[int, int] = {}

    def script(seed: int, position: int) -> int:
        return int(words[position - starts.setdefault(seed, position)])

    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    controller, terminal = pty.openpty()
    with fake_service(tmp_path, script=script) as service, open(terminal, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        with pytest.raises(SystemExit):
            main(["chat", "--server", service.server.grpc_address])
        written = ""
        while not written.endswith("\n"):
            written += os.read(controller, 65536).decode()
    os.close(controller)
    assert written == "\\x1b]0;owned\\x07 said\r\n"
