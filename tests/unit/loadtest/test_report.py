"""The report: a page that needs nothing but itself, whatever the run was."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from bench_runs import ARMS, MadeArm, MadeRun, make_run

from outrider.loadtest.records import RequestOutcome, write_records
from outrider.loadtest.report import write_report
from outrider.loadtest.report.context import ReportContext
from outrider.loadtest.report.details import chosen_cells
from outrider.loadtest.report.parts import clean, label
from outrider.loadtest.report.plots import decimated
from outrider.loadtest.results.analysis import analyse
from outrider.loadtest.results.findings import findings_of
from outrider.loadtest.results.measures import Slo
from outrider.loadtest.runs import ArmFacts, RunFacts, RunFolder, ServerSample, append

VOID = {"meta", "br", "hr", "img", "link", "input", "wbr", "col"}
EVIL = "</title><script>alert(1)</script><img src=x onerror=alert(2)>"
ODD_NAME = "$x^{$ \x00\n" + "long " * 60 + "\"'<&"
EVIL_ERROR = ('<script>alert("error")</script>', "<b>message</b>")
# Drawing is what takes the time, so one report with everything in it serves many tests.
USUAL = MadeRun(
    arms=(MadeArm("off"), MadeArm(EVIL, 2), MadeArm(ODD_NAME, 3)),
    loads=(1, 4),
    blocks=4,
    shift_s=8,
    output_tokens=16,
    failing=0.1,
    error=EVIL_ERROR,
)


class Page(HTMLParser):
    """Checks that elements close in the order they opened, and keeps what tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has {name}"
            if name == "id":
                self.ids.append(str(value))
            elif name in ("src", "href", "xlink:href", "action", "data", "srcset"):
                self.references.append(str(value))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def report_of(folder: Path, made: MadeRun, slo: Slo | None = None) -> str:
    return page_of(make_run(folder, made), slo)


def page_of(run: RunFolder, slo: Slo | None = None) -> str:
    (written,) = write_report(run, analyse(run, slo), png=False)
    return written.read_text(encoding="utf-8")


def sections_of(text: str) -> list[str]:
    return re.findall(r'<section id="([a-z]+)"', text)


def charts_of(text: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> str:
    return report_of(tmp_path_factory.mktemp("usual"), USUAL, Slo(ttft_ms=300))


def test_the_page_is_well_formed_small_and_its_ids_are_unique(usual: str) -> None:
    page = Page(usual)
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("svg") > 15
    assert "prefers-color-scheme:dark" in usual
    assert len(usual.encode()) < 1_000_000


def test_the_page_refers_to_nothing_outside_itself(usual: str) -> None:
    page = Page(usual)
    inside = {f"#{each}" for each in page.ids}
    assert page.references and set(page.references) <= inside
    assert set(re.findall(r"url\((#[^)]*)\)", usual)) <= inside
    assert not re.search(r"@import|url\((?!#)", usual)
    assert "http://" not in usual and "https://" not in usual


def test_no_colour_of_the_drawing_is_left_in_the_page(usual: str) -> None:
    """Charts are drawn in stand-ins, which the style sheet's variables replace."""
    assert "var(--arm-2)" in usual
    assert not re.search(r"#fe0[12][0-9a-f]{2}", usual)
    assert not any(re.search(r"(fill|stroke): ?#", chart) for chart in charts_of(usual))


def test_the_page_has_every_section_in_order(usual: str) -> None:
    assert sections_of(usual) == [
        *("finding", "cautions", "run", "summary", "verdict", "latency", "throughput", "spread"),
        *("time", "acceptance", "updates", "categories", "lengths", "errors", "servers"),
    ]


def test_every_chart_has_its_figures_as_a_table(usual: str) -> None:
    assert usual.count("<figure") == usual.count("The figures as a table") > 8


def test_hostile_names_and_errors_are_only_ever_text(usual: str) -> None:
    page = Page(usual)
    assert page.tags.count("script") == 1  # our own
    assert "img" not in page.tags and "b" not in page.tags
    assert EVIL in page.text and EVIL_ERROR[0] in page.text
    assert "\x00" not in usual


def test_long_names_are_shortened_in_charts_and_whole_in_tables(usual: str) -> None:
    whole = escape(clean(ODD_NAME))
    drawn = "".join(charts_of(usual))
    assert whole in usual and whole not in drawn
    assert escape(label(ODD_NAME, 16), quote=False) in drawn


def test_significance_is_said_in_words(usual: str) -> None:
    assert re.search(r'<td class="n better">× 0\.\d+, better</td>', usual)
    assert "no difference shown" in usual


ODD = {
    "one of everything": MadeRun(
        (MadeArm("only"),), (1,), blocks=1, shift_s=3, output_tokens=1, has_samples=False
    ),
    "all failed": MadeRun(loads=(2,), blocks=2, shift_s=3, failing=1.0, has_samples=False),
    "no request": MadeRun(loads=(1, 2), blocks=0),
    "no load": MadeRun(loads=()),
    "no arm": MadeRun(arms=(), loads=(1,)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_runs_have_a_report_too(tmp_path: Path, name: str) -> None:
    page = Page(report_of(tmp_path, ODD[name], Slo(e2e_ms=900)))
    assert {"finding", "run", "summary"} <= set(page.ids)
    assert "nan" not in page.text.split()


def test_a_folder_with_nothing_but_its_facts_has_a_report(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_facts(RunFacts("outrider bench serve", "then", 0, [ArmFacts("a", "a", "x")], []))
    run.requests_path.touch()
    assert "No load was run." in Page(page_of(run)).text


def test_cautions_follow_the_finding(tmp_path: Path) -> None:
    made = MadeRun(loads=(1,), kind="clients", blocks=1, shift_s=1, failing=1, is_natural=False)
    text = report_of(tmp_path, made)
    assert sections_of(text)[:2] == ["finding", "cautions"]
    assert "random tokens" in text and "closed loop" in text


def test_what_was_done_to_a_server_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path, ODD["no request"])
    event = {"at_s": 20, "did": "kill", "what": "<draft>", "pid": 7, "error": None}
    (tmp_path / "chaos.jsonl").write_text(json.dumps(event) + "\n")
    text = page_of(run)
    assert '<section id="chaos"' in text and "<td>&lt;draft&gt;</td>" in text


def test_harm_and_growth_come_before_everything_else(tmp_path: Path) -> None:
    made = MadeRun(ARMS[:1], (2,), blocks=2, shift_s=6, failing=0, output_tokens=4)
    run = make_run(tmp_path, replace(made, keeps_answers=True, has_samples=False))
    disturb(run, lost=2)
    for minute in range(40):
        append(
            run.samples_path,
            ServerSample(60.0 * minute, "outrider", None, memory_mb=900 + 5 * minute),
        )
    text = page_of(run)
    assert "<h1>Chaos did harm: 2 of " in text
    assert sections_of(text)[:3] == ["finding", "chaos", "soak"]
    top = text[text.index('<section id="finding"') : text.index("<nav>")]
    assert "outrider: memory grows by 300 MB an hour" in top
    assert "kill draft 0 at " in text and "1 of 1 measures grow." in text


def test_events_belong_to_the_arm_they_struck_and_harm_is_said_first(tmp_path: Path) -> None:
    made = MadeRun(ARMS[:2], (2,), blocks=2, shift_s=6, failing=0, output_tokens=4)
    run = make_run(tmp_path, replace(made, keeps_answers=True, has_samples=False))
    disturb(run, lost=2)
    found = findings_of(run, analyse(run))
    struck = {name: len(each.recoveries) for name, each in found.chaos.items()}
    assert struck == {"off at rate 2": 0, "depth 2 at rate 2": 1}
    assert found.sentences[0].startswith("depth 2 at rate 2: Chaos did harm: 2 of ")
    assert len(found.sentences) == len(set(found.sentences))


def test_a_run_that_is_sound_is_said_to_be_so_in_its_place(tmp_path: Path) -> None:
    made = MadeRun(ARMS[:1], (2,), blocks=2, shift_s=4, failing=0, output_tokens=4)
    run = make_run(tmp_path, replace(made, keeps_answers=True, has_samples=False))
    disturb(run, lost=0)
    for minute in range(40):
        append(run.samples_path, ServerSample(60.0 * minute, "outrider", None, memory_mb=900))
    text = page_of(run)
    assert re.search(r"<h1[^>]*>“off” at 2 requests a second", text)
    assert "Chaos lost nothing: " in text and "Nothing grew over the run" in text


def test_what_a_search_found_is_the_title(tmp_path: Path) -> None:
    note = "off: up to 4.2 requests a second meet the SLO."
    made = MadeRun(ARMS[:1], (2,), blocks=1, shift_s=2, notes=("trace x: 3 rows.", note))
    text = report_of(tmp_path, replace(made, has_samples=False, output_tokens=2))
    assert f"<h1>{note.removesuffix('.')}</h1>" in text


@pytest.mark.thorough
def test_a_matrix_has_a_row_for_each_cell_and_a_chart_for_each_setting(tmp_path: Path) -> None:
    made = MadeRun(
        arms=ARMS[:2],
        loads=(1, 4),
        shift_s=6,
        output_tokens=16,
        failing=0,
        texts=("qa", "code"),
        temperatures=(0.7,),
        has_samples=False,
        keeps_answers=True,
    )
    text = report_of(tmp_path, made)
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    names = sections_of(text)
    assert names.index("matrix") < names.index("summary")
    matrix = text[text.index('<section id="matrix"') : text.index('<section id="summary"')]
    assert matrix.count("<tr") == 1 + 4
    assert re.search(r"answer time × 0\.\d+ \(0\.\d+ to 0\.\d+\), better", matrix)
    assert text.count("Latency of each arm against the load, code</h3>") == 1
    assert len([each for each in page.ids if each.startswith("chart-latency-rate-")]) == 2
    assert len([each for each in page.ids if each.startswith("chart-verdict-")]) == 2
    assert "answers of “depth 2” and “off” are the same token by token" in text


def disturb(run: RunFolder, lost: int) -> None:
    """A kill in the second block, which is what the first requests after it were lost to."""
    *_, shift = run.shifts()
    at_s = shift.measured_from_s + 1
    records = list(run.requests())
    last = (shift.arm, shift.block)
    own = [each for each in records if (each.arm, each.block) == last and each.end_s > at_s]
    for record in own[:lost]:
        record.outcome, record.error, record.token_ids = RequestOutcome.ERROR, "reset", None
    run.requests_path.unlink()
    write_records(run.requests_path, records)
    event = {"at_s": at_s, "did": "kill", "what": "draft 0", "pid": 7}
    run.chaos_path.write_text(json.dumps(event) + "\n")


def test_of_many_loads_a_few_are_drawn_the_first_and_the_last_among_them(tmp_path: Path) -> None:
    loads = tuple(float(1 + n) for n in range(24))
    made = MadeRun((MadeArm("a"),), loads, blocks=1, shift_s=2, output_tokens=2, has_samples=False)
    run = make_run(tmp_path, made)
    drawn = [cell.value for cell in chosen_cells(ReportContext(run, analyse(run)))]
    assert len(drawn) == 8 and drawn[0] == 1 and drawn[-1] == 24


def test_long_series_are_thinned_and_keep_their_breaks() -> None:
    x = np.arange(100_000, dtype=np.float64)
    x[50_000] = np.nan
    thin_x, thin_y = decimated(x, np.where(x < 50_000, 1.0, 3.0))
    assert thin_x.size < 400
    assert set(thin_y[~np.isnan(thin_y)]) == {1.0, 3.0}
    assert np.isnan(thin_x).sum() >= 1


@pytest.mark.thorough
def test_the_same_run_gives_the_same_bytes_and_pictures_that_are_real(tmp_path: Path) -> None:
    arms = (MadeArm("off"), MadeArm("on", 1))
    made = MadeRun(arms, (1,), blocks=1, shift_s=4, output_tokens=2, has_samples=False)
    run = make_run(tmp_path, made)
    first = page_of(run)
    written = write_report(RunFolder(tmp_path), analyse(RunFolder(tmp_path)))
    assert written[0].read_text(encoding="utf-8") == first
    names = [path.relative_to(tmp_path).as_posix() for path in written]
    assert names[:3] == ["report.html", "overview.png", "pictures/verdict.png"]
    for path in written[1:]:
        picture = path.read_bytes()
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", picture[16:24])
        assert width > 500 and height > 150
