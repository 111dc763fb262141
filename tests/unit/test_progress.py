"""Long work: a line for each long stage of it, on a terminal a spinner."""

import io
import threading
import time

from rich.console import Console

from outrider.progress import ProgressLines, ProgressSpinner
from outrider.progress_stages import StageReporter, stage


def console_on(file: io.StringIO) -> Console:
    return Console(file=file, width=80)


def lines_of(file: io.StringIO, count: int) -> list[str]:
    deadline_s = time.monotonic() + 60
    while file.getvalue().count("\n") < count and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return file.getvalue().splitlines()


def test_a_line_comes_when_work_takes_long_and_again_while_it_lasts() -> None:
    file = io.StringIO()
    with ProgressSpinner(console_on(file), "loading [big]", soon_s=0.02, again_s=0.05):
        told = lines_of(file, 3)
    assert told[:3] == ["loading [big]", *["loading [big], 0 s so far"] * 2]
    time.sleep(0.1)
    assert file.getvalue().count("\n") <= len(told) + 1  # one may have been on its way


def test_each_long_stage_of_the_work_has_one_line() -> None:
    file = io.StringIO()
    with ProgressSpinner(console_on(file), "loading", soon_s=0.02):
        with stage("compiling (0 of 2)") as update:
            update("compiling (1 of 2)")
            lines_of(file, 1)
            update("compiling (2 of 2)")
        with stage("reading weights"):
            lines_of(file, 2)
        with stage("soon done"):
            pass
        told = lines_of(file, 3)
    assert told == ["compiling (1 of 2)", "reading weights", "loading"]


def test_stages_of_other_threads_are_not_taken_for_parts() -> None:
    reported: list[str] = []
    over = threading.Event()

    def work() -> None:
        with stage("beside it"):
            over.wait(60)

    with StageReporter(reported.append, soon_s=0.02), stage("outer"):
        thread = threading.Thread(target=work)
        thread.start()
        with stage("inner"):
            deadline_s = time.monotonic() + 60
            while len(reported) < 2 and time.monotonic() < deadline_s:
                time.sleep(0.01)
        over.set()
        thread.join()
    assert sorted(reported) == ["beside it", "inner"]


def test_a_spinner_shows_the_stage_that_is_under_way() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True)
    with ProgressSpinner(console, "loading"), stage("reading [all] weights"):
        deadline_s = time.monotonic() + 60
        while "reading [all] weights" not in file.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert "reading [all] weights" in file.getvalue()


def test_short_work_says_nothing() -> None:
    file = io.StringIO()
    with ProgressSpinner(console_on(file), "loading small"):
        pass
    assert file.getvalue() == ""


def test_it_may_be_stopped_before_the_end() -> None:
    work = ProgressSpinner(console_on(io.StringIO()), "reading")
    work.start()
    work.stop()
    work.stop()


def test_whoever_works_may_tell_as_often_as_it_likes() -> None:
    said: list[str] = []
    often, seldom = (
        ProgressLines(said.append, every_s=0.0),
        ProgressLines(said.append, every_s=60.0),
    )
    for step in range(3):
        often.report(f"generating: {step} of 3 done")
        seldom.report("not yet")
    assert said == [f"generating: {step} of 3 done, 0 s so far" for step in range(3)]
