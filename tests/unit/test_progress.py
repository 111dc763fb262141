"""Long work without a terminal: a line every few seconds, and no more."""

import io
import time

from rich.console import Console

from outrider.progress import AtWork, Lines


def console_on(file: io.StringIO) -> Console:
    return Console(file=file, width=80)


def test_lines_come_while_the_work_lasts_and_stop_with_it() -> None:
    file = io.StringIO()
    with AtWork(console_on(file), "loading big", every_s=0.02):
        deadline_s = time.monotonic() + 60
        while file.getvalue().count("\n") < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
    told = file.getvalue().splitlines()
    assert len(told) >= 2
    assert told[0] == "loading big, 0 s so far"
    time.sleep(0.1)
    assert file.getvalue().count("\n") <= len(told) + 1  # one may have been on its way


def test_short_work_says_nothing() -> None:
    file = io.StringIO()
    with AtWork(console_on(file), "loading small"):
        pass
    assert file.getvalue() == ""


def test_it_may_be_stopped_before_the_end() -> None:
    work = AtWork(console_on(io.StringIO()), "reading")
    work.start()
    work.stop()
    work.stop()


def test_whoever_works_may_tell_as_often_as_it_likes() -> None:
    said: list[str] = []
    often, seldom = Lines(said.append, every_s=0.0), Lines(said.append, every_s=60.0)
    for step in range(3):
        often.tell(f"generating: {step} of 3 done")
        seldom.tell("not yet")
    assert said == [f"generating: {step} of 3 done, 0 s so far" for step in range(3)]
