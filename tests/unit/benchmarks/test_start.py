"""What the bench of starts reads from a server's lines."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outrider.benchmarks.start import Start, processor_s, stages_of, table
from outrider.errors import OutriderError

LINES = """outrider 0.1.0: smollm2-135m-instruct, drafted for by smollm2-135m-draft
    3.1 s  compiling CPU kernels (7 of 21)
    3.3 s  models and tokenizers checked
    4.4 s  Ray started on this machine (6 CPUs, 0 GPUs)
    9.9 s  target: 1 of 1 ranks up after 1.8 s (pid 23611)
   10.1 s  target rank 0: weights loaded in 0.1 s
ready in 13.1 s
""".splitlines()


def test_stages_have_the_seconds_at_which_they_were_over() -> None:
    stages, ready_s = stages_of(LINES)
    assert stages == {
        "models checked": 3.3,
        "Ray started": 4.4,
        "ranks up": 9.9,
        "weights loaded": 10.1,
    }
    assert ready_s == 13.1


def test_a_server_that_ends_is_an_error() -> None:
    with pytest.raises(OutriderError, match="ended before it was ready"):
        stages_of(LINES[:-1])


def test_processors_are_charged_for_children_that_have_ended() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7))']);"
    script += "print(flush=True); input()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used_s = processor_s(process.pid)
        process.communicate(b"\n")
    assert used_s > 0.1


def test_the_table_has_medians_and_leaves_out_what_nobody_had() -> None:
    starts = [Start({"ranks up": seconds}, 2 * seconds, 30.0, 193.5) for seconds in (9.0, 1.0, 2.0)]
    assert table({"cold": starts, "warm": [Start({}, 1.0, 2.0, 3.0)]}).splitlines() == [
        "|  | cold | warm |",
        "|---|---:|---:|",
        "| ranks up | 2.0 |  |",
        "| ready | 4.0 | 1.0 |",
        "| processor seconds | 30.0 | 2.0 |",
        "| MB kept | 193.5 | 3.0 |",
    ]
