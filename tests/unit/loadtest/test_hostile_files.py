"""Files that are damaged, without end, or written to do harm: one sentence, soon."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import input_files
from outrider.errors import ConfigError, OutriderError
from outrider.loadtest.prompts import read_prompts
from outrider.loadtest.records import (
    CountedBy,
    RequestOutcome,
    RequestRecord,
    ShiftPhase,
    read_records,
)
from outrider.loadtest.runs import RunFacts, RunFolder, ServerSample, append
from outrider.loadtest.servers.chaos import read_events
from outrider.loadtest.servers.chaos_file import read_chaos
from outrider.loadtest.servers.counters import put_metrics, read_prometheus
from outrider.loadtest.servers.server import ServerSpec, ServerUnderTest
from outrider.loadtest.traces import read_trace

Row = dict[str, Any]


# -- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda path: read_prompts(f"jsonl:{path}"),
        lambda path: read_prompts(f"sharegpt:{path}"),
        lambda path: read_prompts(f"speed-bench:{path}"),
        lambda path: read_trace(str(path)),
        read_chaos,
    ],
)
@pytest.mark.parametrize("name", ["pipe", "pipe.gz"])
@pytest.mark.timeout(30)
def test_a_pipe_nobody_writes_to_is_refused_at_once(
    read: Callable[[Path], Any], name: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="not a regular file"):
        read(tmp_path / name)


def test_a_device_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a regular file"):
        read_prompts("jsonl:/dev/zero")


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_without_end_is_refused(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(input_files.numbered_lines, "__defaults__", (1000,))
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    with gzip.open(path, "wb") if packed else path.open("wb") as file:
        file.write(b'{"prompt": "' + b"x" * 100_000)
    with pytest.raises(ConfigError, match="a.jsonl.*:1 is longer than 1000 bytes"):
        read_prompts(f"jsonl:{path}")


def test_a_text_that_is_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "MAX_TEXT_BYTES", 1000)
    path = tmp_path / "a.json"
    path.write_text("[\n" + "1,\n" * 1000 + "1]")
    with pytest.raises(ConfigError, match="longer than 1000 bytes"):
        read_prompts(f"sharegpt:{path}")


# -- chaos files ----------------------------------------------------------------------------------


def test_names_that_stand_for_a_value_without_end_are_told_briefly(tmp_path: Path) -> None:
    lines = ["- &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"- &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    for form in ("{}", "{{at: 1s, do: {}, what: draft}}", "{{at: {}, do: kill, what: draft}}"):
        path = tmp_path / "bomb.yaml"
        path.write_text("\n".join([*lines, "- " + form.format("*a8")]))
        with pytest.raises(ConfigError) as caught:
            read_chaos(path)
        assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("at", ["9" * 400, "1e400", "[1]", "1000000000s"])
def test_a_time_that_never_comes_is_refused(at: str, tmp_path: Path) -> None:
    path = tmp_path / "chaos.yaml"
    path.write_text(f"- {{at: {at}, do: kill, what: draft}}")
    with pytest.raises(ConfigError, match="at is"):
        read_chaos(path)


@pytest.mark.parametrize("text", ["- " + "[" * 5000, "x" * (input_files.MAX_SETTINGS_BYTES + 1)])
def test_a_chaos_file_that_is_too_deep_or_too_long_is_one_sentence(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "chaos.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_chaos(path)
    assert "\n" not in str(caught.value)


# -- what a run has left, edited ------------------------------------------------------------------

RECORD = RequestRecord(
    id="q/0",
    arm="a",
    cell="rate 1",
    block=0,
    phase=ShiftPhase.MEASURED,
    category="c",
    intended_s=1.0,
    sent_s=1.0,
    end_s=2.0,
    outcome=RequestOutcome.OK,
    update_s=[0.1, 0.2],
    update_tokens=[1, 2],
    output_tokens=3,
    counted_by=CountedBy.IDS,
)


def edited(**fields: Any) -> str:
    return json.dumps({**json.loads(RECORD.to_json()), **fields})


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "7",
        "null",
        "{",
        "[" * 100_000,
        edited(sent_s="soon"),
        edited(sent_s=None),
        edited(sent_s=float("nan")),
        edited(end_s=1e300),
        edited(intended_s=float("inf")),
        edited(block="0"),
        edited(output_tokens=10**400),
        edited(output_tokens=-1),
        edited(output_tokens=2.5),
        edited(prompt_tokens="7"),
        edited(update_s=["a"]),
        edited(update_s=[-1.0, 0.5]),
        edited(update_s=7),
        edited(update_tokens=[1]),
        edited(update_tokens={}),
        edited(speculated=7),
        edited(speculated={"rounds": "x"}),
        edited(speculated={"rounds_by_accepted": ["x"]}),
        edited(arm=7),
        edited(arm=None),
        edited(id=["x"]),
        edited(phase="soon"),
        edited(unknown=1),
        edited(message={"a": 1}),
    ],
)
def test_an_edited_record_is_named_in_one_sentence(line: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(f"{RECORD.to_json()}\n\n{line}\n")
    with pytest.raises(OutriderError, match="requests.jsonl:3 is not a record") as caught:
        list(read_records(path))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500 + len(str(path))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(RECORD.to_json() + "\n")
    assert list(read_records(path)) == [RECORD]


@pytest.mark.parametrize("content", [None, b"\xff\xfe\n"])
def test_records_that_cannot_be_read_are_one_sentence(
    content: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OutriderError, match=r"requests\.jsonl"):
        list(read_records(path))


def test_names_of_a_file_that_was_given_are_fit_to_print(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(edited(arm="a\x1b[2J", error="http\n500", message="\x9b", category="\r") + "\n")
    [record] = read_records(path)
    assert record.error is not None and record.message is not None
    assert "".join((record.arm, record.error, record.message, record.category)).isprintable()


SHIFT = {"arm": "a", "cell": "rate 1", "block": 0, "start_s": 0.0, "end_s": 9.0} | {
    "measured_from_s": 0.0,
    "measured_to_s": 9.0,
}


@pytest.mark.parametrize(
    "wrong",
    [{"start_s": "x"}, {"start_s": float("nan")}, {"arm": 1}, {"what": 1}, {"block": True}],
)
def test_an_edited_shift_is_named_in_one_sentence(wrong: Row, tmp_path: Path) -> None:
    path = tmp_path / "shifts.jsonl"
    path.write_text(json.dumps(SHIFT) + "\n")
    assert RunFolder(tmp_path).shifts()[0].end_s == 9.0
    path.write_text(json.dumps({**SHIFT, **wrong}) + "\n")
    with pytest.raises(OutriderError, match=r"shifts\.jsonl:1 is not"):
        RunFolder(tmp_path).shifts()


@pytest.mark.parametrize("line", ["{", "[]", '{"at_s": 1}', '{"at_s": "x", "server": "s"}'])
def test_edited_samples_and_events_are_named_in_one_sentence(line: str, tmp_path: Path) -> None:
    for name in ("samples.jsonl", "chaos.jsonl"):
        (tmp_path / name).write_text(line)
    with pytest.raises(OutriderError, match=r"samples\.jsonl:1 is not"):
        RunFolder(tmp_path).samples()
    with pytest.raises(OutriderError, match=r"chaos\.jsonl:1 is not"):
        read_events(tmp_path / "chaos.jsonl")


FACTS = {"command": "c", "started": "s", "seed": 0, "arms": [], "cells": []}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[" * 100_000,
        json.dumps({**FACTS, "arms": 7}),
        json.dumps({**FACTS, "arms": [7]}),
        json.dumps({**FACTS, "arms": [{"name": 1, "server": "s", "url": "u"}]}),
        json.dumps({**FACTS, "cells": [{"name": "n", "kind": "rate", "value": float("nan")}]}),
        json.dumps({**FACTS, "notes": [1]}),
        json.dumps({**FACTS, "options": []}),
    ],
)
def test_edited_facts_are_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(OutriderError, match="is not the folder of a run"):
        _ = RunFolder(tmp_path).facts


def test_names_in_the_facts_are_fit_to_print(tmp_path: Path) -> None:
    arm = {"name": "a\x1b[2J", "server": "s", "url": "u\n"}
    text = json.dumps({**FACTS, "arms": [arm], "notes": ["\x1b]0;x\x07"]})
    (tmp_path / "run.json").write_text(text)
    facts = RunFolder(tmp_path).facts
    assert (facts.arms[0].name + facts.arms[0].url + facts.notes[0]).isprintable()


# -- counters -------------------------------------------------------------------------------------

POSITION = 'vllm:spec_decode_num_accepted_tokens_per_pos{position="%s"} %s'


def test_a_position_out_of_reach_is_left_out() -> None:
    sample = ServerSample(0.0, "s", None)
    wrong = ["1000000000", "-5", "x", "9" * 5000, "²"]
    page = [POSITION % ("1", 7), *(POSITION % (each, 9) for each in wrong)]
    put_metrics(sample, "\n".join(page))
    assert sample.accepted_by_position == [0, 7]


def test_a_counter_beyond_all_counting_is_left_out() -> None:
    sample = ServerSample(0.0, "s", None)
    values = ("NaN", "+Inf", "1e300", "-1e300")
    put_metrics(sample, "\n".join(f"vllm:num_requests_running {each}" for each in values))
    assert sample.running is None


def test_what_is_counted_can_be_read_again(tmp_path: Path) -> None:
    sample = ServerSample(0.0, "s", None)
    line = 'vllm:generation_tokens_total{engine="%d"} 9e11'
    put_metrics(sample, "\n".join(line % each for each in range(5)))
    append(tmp_path / "samples.jsonl", sample)
    assert RunFolder(tmp_path).samples() == [sample]


@pytest.mark.timeout(30)
def test_labels_take_no_time_by_the_square_of_their_length() -> None:
    [point] = read_prometheus("a{" + "x" * 1_000_000 + "} 1")
    assert point.labels == {}


# -- logs -----------------------------------------------------------------------------------------


def test_a_server_s_name_stays_within_the_folder(tmp_path: Path) -> None:
    for name in ("../../etc/x", "a/b", "x" * 500, "\n"):
        server = ServerUnderTest(
            ServerSpec(name, "http://127.0.0.1:1", command="true"), tmp_path / "run"
        )
        assert server.log_path.parent == tmp_path / "run"
        assert len(server.log_path.name) < 100


def test_the_end_of_a_log_is_short_and_fit_to_print(tmp_path: Path) -> None:
    server = ServerUnderTest(ServerSpec("s", "http://127.0.0.1:1", command="true"), tmp_path)
    server.log_path.write_bytes(b"x" * 3_000_000 + b"\x1b[2Jgone\x07\nlast\xff\n")
    told = server._log_end()
    assert told.endswith("gone \nlast\ufffd") and "\x1b" not in told
    assert len(told) < 20_000 + len(str(server.log_path))


def test_a_log_of_an_earlier_run_is_not_this_one_s(tmp_path: Path) -> None:
    async def run() -> str:
        spec = ServerSpec("s", "http://127.0.0.1:{port}", command="true {port}")
        server = ServerUnderTest(spec, tmp_path)
        server.log_path.write_text("of an earlier run")
        with pytest.raises(OutriderError) as caught:
            await server.start()
        return str(caught.value)

    assert "earlier run" not in asyncio.run(run())


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://127.0.0.1:99999", "grpc://127.0.0.1", "x:y"]
)
def test_a_server_at_a_wrong_address_is_refused_before_it_is_waited_for(url: str) -> None:
    with pytest.raises(ConfigError, match="target"):
        ServerSpec("s", url)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutriderError, match="give --out another folder"):
        RunFolder(tmp_path / "file").write_facts(RunFacts("c", "s", 0, [], []))
