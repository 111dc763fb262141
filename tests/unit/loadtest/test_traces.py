"""Readers of recorded traffic."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.loadtest.traces import BUNDLED, PREFIX_BLOCK, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


# Numbers as each SOURCE.txt has them, "about one hour"; spans as the files' last lines do.
@pytest.mark.parametrize(
    ("name", "num", "last_s"),
    [
        ("azure-conv", 19_366, 3501.721937),
        ("azure-code", 8_819, 3435.948056),
        ("mooncake", 12_031, 3536.999),
    ],
)
def test_a_bundled_trace_is_read_whole(name: str, num: int, last_s: float) -> None:
    rows = read_trace(name)

    assert len(rows) == num
    assert f"{num:,}" in (BUNDLED[name].parent / "SOURCE.txt").read_text()
    assert rows[0].at_s == 0
    assert rows[-1].at_s == pytest.approx(last_s, abs=1e-5)
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
    assert [row.number for row in rows] == list(range(num))
    if name == "mooncake":
        assert all(len(row.prefix_ids) == -(-row.prompt_tokens // PREFIX_BLOCK) for row in rows)


def test_a_window_is_cut_in_the_traces_time_and_then_replayed_faster() -> None:
    whole = read_trace("azure-code")

    cut = read_trace("azure-code", start_s=600, duration_s=60, scale=2)

    expected = [row for row in whole if 600 <= row.at_s < 660]
    assert [row.number for row in cut] == [row.number for row in expected]
    assert [row.at_s for row in cut] == pytest.approx([(row.at_s - 600) / 2 for row in expected])


def test_a_file_is_read_by_its_layout_whatever_its_name(tmp_path: Path) -> None:
    azure = tmp_path / "mine.txt"
    azure.write_text(
        HEADER + "2024-05-10 00:00:02.5+00:00,7,2\r\n\r\n2024-05-10 00:00:00+00:00,5,1\r\n"
    )
    mooncake = tmp_path / "mine.gz"
    mooncake.write_bytes(
        gzip.compress(
            b'{"timestamp": 500, "input_length": 600, "output_length": 3, "hash_ids": [4, 9]}\n'
            b'{"timestamp": 1500, "input_length": 6, "output_length": 3}\n'
        )
    )

    by_time = [(row.at_s, row.prompt_tokens, row.number) for row in read_trace(str(azure))]
    with_prefixes = [(row.at_s, row.prefix_ids) for row in read_trace(str(mooncake))]

    assert by_time == [(0.0, 5, 0), (2.5, 7, 1)]
    assert with_prefixes == [(0.0, (4, 9)), (1.0, ())]


@pytest.mark.parametrize(
    "row",
    ["soon,1,1", "2023-11-16 18:17:03,x,1", "2023-11-16 18:17:03,1", "2023-11-16 18:17:03,0,1"],
)
def test_a_wrong_row_of_azures_layout_is_named_by_its_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "2023-11-16 18:17:03.9799600,4808,10\r\n" + row + "\r\n")

    with pytest.raises(ConfigError, match=r"trace\.csv:3\b"):
        read_trace(str(path))


@pytest.mark.parametrize(
    "row",
    [
        "{",
        "[]",
        '{"timestamp": -1, "input_length": 1, "output_length": 1}',
        '{"timestamp": NaN, "input_length": 1, "output_length": 1}',
        '{"timestamp": true, "input_length": 1, "output_length": 1}',
        '{"timestamp": 1, "input_length": 0, "output_length": 1}',
        '{"timestamp": 1, "input_length": 1e3, "output_length": 1}',
        '{"timestamp": 1, "input_length": 1, "output_length": null}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 3}',
        '{"timestamp": 1, "input_length": 999999999999, "output_length": 1}',
    ],
)
def test_a_wrong_row_of_mooncakes_layout_is_named_by_its_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1}\n' + row + "\n")

    with pytest.raises(ConfigError, match=r"trace\.jsonl:2\b"):
        read_trace(str(path))


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\x1f\x8b\x08"])
def test_a_file_in_no_known_layout_is_refused_with_those_known(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"trace\.csv"):
        read_trace(str(path))


def test_a_trace_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER)

    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(str(path))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'azure' is neither one of azure-code, azure-conv, moon"):
        read_trace("azure")


@pytest.mark.parametrize("path", ["a\0b", "~nobody-at-all/x", "x" * 5000, "/"])
def test_a_path_that_cannot_be_is_refused_in_a_sentence(path: str) -> None:
    with pytest.raises(ConfigError, match=r"nor a file|unknown home folder|cannot be read"):
        read_trace(path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"scale": 0.0}, "scale is 0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"start_s": -1.0}, "start_s is -1"),
        ({"duration_s": 0.0}, "duration_s is 0"),
        ({"start_s": 99_999.0}, "window from 99999 s has no request .* 3436 s long"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_trace("azure-code", **options)
