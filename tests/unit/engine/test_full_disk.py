"""Engines and ranks are started while the temporary folder is full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.logs import open_log

SCRIPT = """
mount -t tmpfs -o size=64k none "$1" && head -c 1048576 /dev/zero > "$1/rest" 2> /dev/null
exec "$2" -c "$3"
"""
CHILD = """
import os
from outrider.config import EngineConfig
from outrider.engine.launch.child import EngineChild, EngineChildError
child = EngineChild(EngineConfig.from_kwargs(model="/nowhere/at-all"))
try:
    child.start(print)
except EngineChildError as error:
    print(error)
finally:
    child.close()
print(os.listdir(os.environ["TMPDIR"]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which takes root")
def test_an_engine_is_started_from_a_full_temporary_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", SCRIPT, "sh", str(tmp_path), sys.executable, CHILD],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace: {done.stderr.strip()}")
    *said, left = done.stdout.splitlines()
    assert "/nowhere/at-all" in "\n".join(said), "the engine has read its settings"
    assert left == "['rest']"


def test_a_process_without_room_for_its_log_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", refuse)
    with caplog.at_level("WARNING", "outrider"), open_log(tmp_path / "rank.log") as log:
        log.write(b"anything")
    assert caplog.messages == [
        f"{tmp_path / 'rank.log'} cannot be written, so no log is kept: No space left on device"
    ]
