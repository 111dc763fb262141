"""The server on a head as a service: a program that stands for it is started, asked and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from free_ports import free_port

from outrider.cluster.deploy import head_keeper, head_service
from outrider.cluster.deploy.head_record import HeadRecord
from outrider.cluster.deploy.head_service import HeadService
from outrider.cluster.deploy.head_systemd import Systemd
from outrider.cluster.errors import ClusterError

# Answers as the admin port does, as long as it is not told to end.
SERVER = """
import http.server, json, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({"status": "serving"}).encode())
    def log_message(self, *args): pass
print("weights loaded", flush=True)
http.server.HTTPServer(("127.0.0.1", PORT), Answer).serve_forever()
"""


class Service(HeadService):
    """With a program of the test's in place of `outrider serve`."""

    program = ""

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    port = free_port()
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "serve.yaml").write_text(f"server: {{admin_port: {port}, drain_s: 1}}\n")
    service = Service(
        tmp_path, Systemd(is_root=False, home=tmp_path.parent / f"{tmp_path.name}-home")
    )
    service.program = SERVER.replace("PORT", str(port))
    yield service
    service.stop(lambda text: None)


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def pid_of(service: Service) -> int | None:
    running = service.running()
    return None if running is None else running.pid


def test_it_is_started_once_and_says_how_it_goes(service: Service) -> None:
    said: list[str] = []
    service.start(said.append, 20)
    pid = pid_of(service)
    assert pid is not None and f"the server is started, as pid {pid}" in said[0]
    service.start(said.append, 20)
    assert pid_of(service) == pid
    assert said[-1] == f"the server runs already, as pid {pid}"


def test_it_has_a_session_of_its_own_so_that_no_terminal_ends_it(service: Service) -> None:
    service.start(lambda text: None, 20)
    pid = pid_of(service)
    assert pid is not None and os.getsid(pid) == pid


def test_settings_that_changed_start_it_anew(service: Service, tmp_path: Path) -> None:
    service.start(lambda text: None, 20)
    before = pid_of(service)
    settings = tmp_path / "conf" / "serve.yaml"
    settings.write_text(settings.read_text() + "seed: 3\n")
    said: list[str] = []
    service.start(said.append, 20)
    assert "has changed: the server is restarted" in said[0]
    assert pid_of(service) not in (before, None)


def test_stopping_ends_it_and_forgets_it(service: Service, tmp_path: Path) -> None:
    service.start(lambda text: None, 20)
    pid = pid_of(service)
    assert pid is not None
    service.stop(lambda text: None)
    assert pid_of(service) is None
    assert sorted(each.name for each in tmp_path.iterdir()) == ["conf", "server.log"]


def test_one_that_does_not_end_is_killed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_service, "END_S", 0.5)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    service.program = deaf + service.program
    service.start(lambda text: None, 20)
    said: list[str] = []
    service.stop(said.append)
    assert "has not ended within 1.5 s and is killed" in said[1]
    assert pid_of(service) is None


def test_one_that_ends_at_once_says_its_last_words(service: Service) -> None:
    service.program = "print('error: no such model')"
    with pytest.raises(
        ClusterError, match="the server has ended; last lines of .*: error: no such"
    ):
        service.start(lambda text: None, 20)


def test_one_that_is_never_ready_is_not_waited_for_for_ever(service: Service) -> None:
    service.program = "import time; time.sleep(60)"
    with pytest.raises(ClusterError, match="is not ready after 0.5 s \\(starting\\)"):
        service.start(lambda text: None, 0.5)


def test_a_pid_that_is_used_again_is_not_taken_for_it(service: Service) -> None:
    service.start(lambda text: None, 20)
    pid = pid_of(service)
    assert pid is not None
    service.stop(lambda text: None)
    service.record.write_text(
        f'{{"process": {{"pid": {os.getpid()}, "started_ticks": 1}}, "digest": ""}}'
    )
    assert service.running() is None


# -- its keeper -------------------------------------------------------------------------------


def test_a_server_that_was_killed_is_started_anew(service: Service) -> None:
    service.start(lambda text: None, 20)
    first = pid_of(service)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: pid_of(service) not in (None, first))
    assert HeadRecord.read(service.record.parent).restarts == 1
    assert "the server has ended (signal 9); restarting in 0 s" in log_of(service)
    until(lambda: log_of(service).count("weights loaded") == 2)
    said: list[str] = []
    service.start(said.append, 20)  # as a second `up` does
    assert said[0] == f"the server runs already, as pid {pid_of(service)}"


def log_of(service: Service) -> str:
    return (service.record.parent / "server.log").read_text()


def test_stopping_ends_the_keeper_as_well(service: Service) -> None:
    service.start(lambda text: None, 20)
    keeper = service.keeper()
    assert keeper is not None
    service.stop(lambda text: None)
    assert not keeper.is_running
    assert pid_of(service) is None


def test_a_server_that_ends_again_and_again_is_stopped_between_two_starts(
    service: Service, tmp_path: Path
) -> None:
    """Its keeper waits longer each time; nobody runs whose pid could be recorded."""
    mark = tmp_path / "conf" / "has-served"
    once = f"import os, sys\nif os.path.exists({str(mark)!r}): sys.exit(3)\n"
    service.program = once + f"open({str(mark)!r}, 'w').close()\n" + service.program
    service.start(lambda text: None, 20)
    pid, keeper = pid_of(service), service.keeper()
    assert pid is not None and keeper is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: "exit code 3); restarting in 1 s" in log_of(service))
    service.stop(lambda text: None)
    assert not keeper.is_running and pid_of(service) is None


def test_a_keeper_that_was_killed_is_replaced_and_the_server_goes_on(service: Service) -> None:
    service.start(lambda text: None, 20)
    pid, keeper = pid_of(service), service.keeper()
    assert pid is not None and keeper is not None
    os.kill(keeper.pid, signal.SIGKILL)
    until(lambda: not keeper.is_running)
    said: list[str] = []
    service.start(said.append, 20)
    assert said[:2] == [
        f"the server runs already, as pid {pid}",
        "its keeper was gone and is restarted",
    ]
    assert service.keeper() not in (None, keeper) and pid_of(service) == pid
    os.kill(pid, signal.SIGKILL)  # which is not a child of the new one
    until(lambda: pid_of(service) not in (None, pid))


def test_one_that_never_served_is_not_tried_for_ever(service: Service) -> None:
    service.program = "raise SystemExit('error: no such model')"
    with pytest.raises(ClusterError, match="no such model"):
        service.start(lambda text: None, 20)
    assert service.keeper() is None and pid_of(service) is None


def test_there_is_one_keeper_at_a_time(service: Service, tmp_path: Path) -> None:
    service.start(lambda text: None, 20)
    command = [sys.executable, "-m", "outrider.cluster.deploy.head_keeper", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "another keeper already runs" in done.stderr


def test_the_log_is_bounded_while_the_server_goes_on_writing_to_it(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "server.log"
    monkeypatch.setattr(head_keeper, "MAX_LOG_BYTES", 1000)
    keeper = head_keeper.Keeper(tmp_path, head_keeper.KeeperSpec("d", ["true"], {}))
    with log.open("ab") as server:
        server.write(b"x" * 1001)
        server.flush()
        keeper._bound_log()
        server.write(b"later\n")
    assert log.read_bytes() == b"later\n"
    assert (tmp_path / "server.log.1").stat().st_size == 1001


# -- where systemd keeps the keeper -----------------------------------------------------------

# Does what a manager does with the one command of the unit.
SYSTEMCTL = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
unit=$HOME/.config/systemd/user/outrider.service
case "$2" in
restart) (exec >/dev/null 2>&1; eval "exec $(sed -n 's/^ExecStart=//p' "$unit")") & ;;
disable) kill "$(sed 's/.*"keeper": {"pid": \\([0-9]*\\).*/\\1/' "$RECORD")" ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a systemd that stands for the user's notes what it was asked."""
    programs = tmp_path.parent / f"{tmp_path.name}-bin"
    programs.mkdir()
    for name in ("systemctl", "loginctl"):
        (programs / name).write_text(SYSTEMCTL)
        (programs / name).chmod(0o755)
    noted = programs / "calls"
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path.parent / f"{tmp_path.name}-home"))
    monkeypatch.setenv("CALLS", str(noted))
    monkeypatch.setenv("RECORD", str(service.record))
    return noted


def test_a_unit_keeps_the_keeper_where_that_is_asked_for(service: Service, calls: Path) -> None:
    service.start(lambda text: None, 20, use_systemd=True)
    pid, keeper = pid_of(service), service.keeper()
    assert pid is not None and keeper is not None
    unit = Path(os.environ["HOME"]) / ".config/systemd/user/outrider.service"
    assert "Restart=always" in unit.read_text() and "KillMode=process" in unit.read_text()
    assert calls.read_text().splitlines() == [
        "loginctl enable-linger",
        "systemctl --user daemon-reload",
        "systemctl --user enable outrider.service",
        "systemctl --user restart outrider.service",
    ]
    service.stop(lambda text: None)
    assert not keeper.is_running and pid_of(service) is None and not unit.exists()
    assert "systemctl --user disable --now outrider.service" in calls.read_text()


def test_a_systemd_that_refuses_is_told_with_what_to_do(service: Service, calls: Path) -> None:
    (calls.parent / "systemctl").write_text("#!/bin/sh\necho no bus >&2; exit 1\n")
    with pytest.raises(ClusterError, match="daemon-reload` failed: no bus; remove metadata.superv"):
        service.start(lambda text: None, 20, use_systemd=True)
    assert service.keeper() is None and pid_of(service) is None
