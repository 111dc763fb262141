"""Gateways that end before they are there."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.errors import ClusterError
from outrider.cluster.events import Event
from outrider.cluster.fleet import Fleet

pytestmark = pytest.mark.timeout(30)

# In the place of a gateway: its first life ends as by a Ctrl-C before it left the terminal.
INTERRUPTED_ONCE = f"""#!{sys.executable}
import os, signal, sys
begun = sys.argv[0] + ".begun"
if os.path.exists(begun):
    sys.exit(3)
open(begun, "w").close()
signal.signal(signal.SIGINT, signal.SIG_DFL)  # it may be ignored where the tests run
os.kill(os.getpid(), signal.SIGINT)
"""


def test_a_ctrl_c_that_meets_a_gateway_before_it_runs_is_not_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "gateway"
    program.write_text(INTERRUPTED_ONCE)
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    said: list[Event] = []
    handlers: Any = None  # not called
    fleet = Fleet(1, {}, "secret", handlers, said.append)

    async def run() -> None:
        await fleet.run()

    with pytest.raises(ClusterError, match="the gateway cannot serve: .* exit code 3"):
        asyncio.run(run())
    fleet.close()
    assert (tmp_path / "gateway.begun").exists()
    assert said == []
