"""Sentences about runs whose truth is known, because a test made them up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from load_records import answered, failed, shift, write_run

from outrider.loadtest.records import CountedBy, RequestRecord
from outrider.loadtest.results.analysis import Analysis, analyse
from outrider.loadtest.results.cautions import cautions
from outrider.loadtest.results.sentences import SpeedFinding, arm_title
from outrider.loadtest.results.sentences import finding as find
from outrider.loadtest.results.verdicts import contrasts, winners
from outrider.loadtest.runs import ArmFacts, CellFacts, RunFacts, ShiftRecord

SECONDS = 10.0


def found_in(analysis: Analysis) -> SpeedFinding:
    found = find(analysis)
    assert found is not None
    return found


def finding(analysis: Analysis) -> list[str]:
    return found_in(analysis).sentences


def facts(kind: str, values: list[float], **more: Any) -> RunFacts:
    arms = [
        ArmFacts("off", "server", "grpc://x", {"speculation": "off"}),
        ArmFacts("d2", "server", "grpc://x", {"speculation": "draft", "num_speculative_tokens": 2}),
    ]
    cells = [CellFacts(f"{kind} {value:g}", kind, value) for value in values]
    return RunFacts("outrider bench serve", "", 0, arms, cells, **more)


def measured(
    told: RunFacts, speed: dict[tuple[str, str], float], *, blocks: int = 5, takes_all: bool = True
) -> Analysis:
    """Arms that send `speed` tokens a second while a machine of its own moods slows both.

    With `takes_all` False, requests arrive faster than they end.
    """
    rng = random.Random(7)
    records: list[RequestRecord] = []
    shifts: list[ShiftRecord] = []
    at = 0.0
    for cell in told.cells:
        for block in range(blocks):
            mood = rng.uniform(0.7, 1.3)
            for arm in told.arms:
                here: dict[str, Any] = {"arm": arm.name, "cell": cell.name, "block": block}
                rate = speed[arm.name, cell.name] * mood * rng.uniform(0.99, 1.01)
                shifts.append(
                    shift(
                        **here,
                        start_s=at,
                        measured_from_s=at,
                        measured_to_s=at + SECONDS,
                        end_s=at + SECONDS,
                    )
                )
                for number in range(8):
                    late = 0.0 if takes_all else SECONDS * (number % 2)
                    update_s = tuple(late + 40 / rate * step / 4 for step in range(1, 5))
                    records.append(
                        answered(
                            f"a/{number}",
                            intended_s=at + number / 8,
                            update_s=update_s,
                            update_tokens=(10, 10, 10, 10) if takes_all else (int(rate),) * 4,
                            **here,
                        )
                    )
                at += SECONDS
    return Analysis(records, shifts, facts=told)


def test_latency_decides_where_the_arms_keep_up() -> None:
    told = facts("rate", [2.0])
    analysis = measured(told, {("off", "rate 2"): 20, ("d2", "rate 2"): 25})
    first, second = finding(analysis)
    assert first.startswith(
        "Speculation of depth 2 helps at 2 requests a second: 20 % shorter median time to "
        "the whole answer ("
    )
    assert second == (
        "At 2 requests a second the arms kept up, so arrivals set the tokens/s and latency is "
        "decisive."
    )


def test_tokens_decide_beyond_what_an_arm_can_take() -> None:
    told = facts("rate", [16.0])
    speed = {("off", "rate 16"): 2000.0, ("d2", "rate 16"): 1600.0}
    said = finding(measured(told, speed, takes_all=False))
    assert said[0].startswith(
        "Speculation of depth 2 costs at 16 requests a second: 20 % fewer tokens/s ("
    )
    assert said[1:] == [
        "“off” did not keep up at 16 requests a second: it finished 50 % of the requests sent.",
        "“d2” did not keep up at 16 requests a second: it finished 50 % of the requests sent.",
    ]


def test_neighbouring_loads_with_one_outcome_share_a_sentence() -> None:
    told = facts("rate", [8.0, 2.0, 4.0, 16.0])
    speed = {("off", cell.name): 20.0 for cell in told.cells} | {
        ("d2", "rate 2"): 25.0,
        ("d2", "rate 4"): 22.0,
        ("d2", "rate 8"): 20.0,
        ("d2", "rate 16"): 18.0,
    }
    analysis = measured(told, speed)
    helps, same, costs, kept_up = finding(analysis)
    assert "helps up to 4 requests a second: 20 % shorter" in helps and "at 4" in helps
    assert helps.count("median time") == 1  # said once, for both
    assert same.startswith("No difference shown between speculation of depth 2 and “off” at 8 req")
    assert "costs at 16 requests a second: 11 % longer" in costs
    assert kept_up.startswith("At 2, 4, 8 and 16 requests a second the arms kept up")
    assert found_in(analysis).headline == (
        "Speculation of depth 2 helps up to 4 requests a second: up to 20 % shorter median time "
        "to the whole answer."
    )


def test_a_closed_loop_is_judged_by_its_tokens() -> None:
    told = facts("clients", [1.0, 8.0])
    speed = {(arm.name, cell.name): 20.0 for arm in told.arms for cell in told.cells}
    analysis = measured(told, speed)
    decisive = [each for each in contrasts(analysis) if each.is_decisive]
    assert [each.quantity.name for each in decisive] == ["tokens_s", "tokens_s"]
    (said,) = finding(analysis)
    assert said.startswith("No difference shown") and "at 1 to 8 clients" in said
    assert "coordinated omission" in cautions(analysis)[-1]


def test_two_blocks_are_too_few() -> None:
    told = facts("rate", [2.0])
    speed = {("off", "rate 2"): 20.0, ("d2", "rate 2"): 40.0}
    said = finding(measured(told, speed, blocks=2))
    assert said[0] == "Whether an arm differs from “off” cannot be said: too few blocks."
    assert said[1].startswith("“off” at 2 requests a second: 16 of 16 requests answered")
    assert len(said) == 3


def test_an_arm_alone_is_described() -> None:
    analysis = Analysis([answered()], [shift()])
    assert finding(analysis) == [
        "“off” at 2 requests a second: 1 of 1 requests answered, 0.3 tokens/s, first token after "
        "100 ms (p99 100), whole answer after 300 ms (p99 300)."
    ]
    assert cautions(analysis) == []
    assert find(Analysis([], [])) is None and cautions(Analysis([], [])) == []


def test_a_name_that_says_the_depth_is_not_said_twice() -> None:
    told = facts("rate", [2.0])
    extras = {"num_speculative_tokens": 4}
    told.arms = [ArmFacts(name, "s", "x", extras) for name in ("depth 4", "ngram 4", "fast")]
    analysis = Analysis([], [], facts=told)
    assert [arm_title(analysis, arm.name) for arm in told.arms] == [
        "Speculation of depth 4",
        "“ngram 4”",
        "“fast” (depth 4)",
    ]


def test_a_run_with_several_texts_is_counted_and_each_text_speaks_for_itself() -> None:
    told = facts("rate", [])
    told.cells = [
        CellFacts(f"rate {rate}, {text}, T {heat:g}", "rate", rate, text, heat)
        for text in ("qa", "code")
        for heat in (0.0, 0.7)
        for rate in (2, 4)
    ]
    speed = {("off", cell.name): 20.0 for cell in told.cells} | {
        ("d2", cell.name): {"qa": 25.0, "code": 20.0}[cell.text] for cell in told.cells
    }
    speed["d2", "rate 4, code, T 0.7"] = 16.0
    analysis = measured(told, speed)
    found = found_in(analysis)
    assert found.headline == (
        "Speculation of depth 2 helps in 4 of 8 cells, costs in 1 and shows no difference in 3."
    )
    assert "; it helps most at rate 4, qa, T 0: 20 % shorter" in found.sentences[0]
    assert "; it costs most at rate 4, code, T 0.7: 24 % longer" in found.sentences[0]
    assert found.sentences[1].startswith("In all cells the arms kept up")
    assert found.sentences[2].startswith("qa, T 0: Speculation of depth 2 helps at 2 to 4 requests")
    assert [each.partition(":")[0] for each in found.sentences[2:]] == [
        *("qa, T 0", "qa, T 0.7", "code, T 0", "code, T 0.7", "code, T 0.7"),
    ]


def test_who_wins_a_cell() -> None:
    told = facts("clients", [1.0])
    told.arms += [ArmFacts("d4", "server", "x"), ArmFacts("d6", "server", "x")]

    def won(d2: float, d4: float, d6: float) -> list[str]:
        names = zip(("off", "d2", "d4", "d6"), (20.0, d2, d4, d6), strict=True)
        speed = {(arm, "clients 1"): each for arm, each in names}
        analysis = measured(told, speed, blocks=6, takes_all=False)
        return winners(analysis, [each for each in contrasts(analysis) if each.is_decisive])

    assert won(40, 60, 30) == ["d4"]
    assert sorted(won(60, 60, 30)) == ["d2", "d4"]
    assert won(10, 12, 14) == ["off"]
    assert won(20, 20, 20) == []


def test_what_a_reader_must_know_is_said(tmp_path: Path) -> None:
    records = [
        answered(prompt_tokens=100, cached_tokens=50, counted_by=CountedBy.TOKENISER),
        failed("http 429"),
        failed(None),
        answered(arm="d2", update_tokens=(2, 2, 2), retries=3),
    ]
    shifts = [
        shift(is_client_bound=True, idle_arms_cpu_s=4.0),
        shift(arm="d2", is_discarded=True),
        shift(arm="d2"),
    ]
    said = cautions(analyse(write_run(tmp_path, records, shifts, is_natural=False)))
    assert said == [
        "The prompts are random tokens, so acceptance is not representative.",
        "The client was the bottleneck in 1 of 2 shifts (off at rate 2): their latencies are "
        "partly its own.",
        "1 shift in which the client was the bottleneck was discarded and measured again.",
        "Servers that were not being measured used 4.0 s of CPU during 10 s of 1 shift, which "
        "the measured server may have lacked.",
        "“off” failed 1 of 3 requests (1 http 429) and timed out on 1: no latency counts them.",
        "“off” had up to 50 % of prompt tokens in its prefix cache: its time to the first token "
        "is that of a warm cache.",
        "Tokens of “off” were counted by tokenising the text of 1 of 1 answers, which may differ "
        "from its tokens.",
        "“d2” needed 3 retries, which its latencies include.",
        "Answers of “d2” are 100 % longer than those of “off” at rate 2: read the time per token "
        "there, not the time to the whole answer.",
    ]


def test_answers_of_other_lengths_at_many_loads_are_one_caution() -> None:
    records = [
        answered(arm=arm, cell=f"rate {rate}", update_tokens=(tokens,) * 3)
        for rate in range(1, 6)
        for arm, tokens in (("off", 10), ("d2", 8 + rate % 2))
    ]
    shifts = [shift(arm=each.arm, cell=each.cell) for each in records]
    (said,) = cautions(Analysis(records, shifts))
    assert said.startswith(
        "Answers of “d2” are not as long as those of “off” at 5 of 5 loads, up to 20 % shorter: "
    )
