"""A deployment on hosts of our own, as its operator has it: files, and `outrider deploy`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hosts import Host, Hosts

COMMAND = [sys.executable, "-m", "outrider", "deploy"]
LIMIT_S = 240.0


class Operator:
    """Has a folder of files made by `outrider deploy init`, edited for these hosts."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self.folder = folder
        self.said: list[str] = []
        self._hosts = hosts
        self._run("init", "on-premise", str(folder / "c"))
        found = re.search(r"shown only now: (\S+)", self.said[-1])
        assert found is not None, self.said
        self.key = found[1]
        self._original = self.file.read_text()

    @property
    def file(self) -> Path:
        return self.folder / "c" / "cluster.yaml"

    @property
    def serving(self) -> Path:
        return self.folder / "c" / "conf" / "serve.yaml"

    def edit(self, head: Host, targets: Sequence[Host], drafts: Sequence[Host]) -> None:
        """The lines marked EDIT; and as hosts share the environment, they install nothing."""
        ips = ", ".join(host.ip for host in (*targets, *drafts))
        pattern = "|".join(f'*" {host.ip} "*' for host in targets)
        text = self._original.replace("EDIT-HEAD-IP", head.ip).replace("EDIT-USER", "root")
        text = text.replace("[EDIT-TARGET-IP, EDIT-DRAFT-IP]", f"[{ips}]")
        text = text.replace('*" EDIT-TARGET-IP "*', pattern)
        text = text.replace("~/.ssh/id_ed25519", str(self._hosts.key))
        text = text.replace("cluster_name: outrider", f"cluster_name: outrider-{os.getpid()}")
        settings = yaml.safe_load(text)
        settings["setup_commands"] = []
        del settings["file_mounts"]["~/outrider/dist"]
        self.file.write_text(yaml.safe_dump(settings))

    def serve(self, settings: dict[str, Any]) -> None:
        """Settings beside those of the file, sections being joined."""
        found = yaml.safe_load(self.serving.read_text())
        for name, value in settings.items():
            found[name] = found.get(name, {}) | value if isinstance(value, dict) else value
        self.serving.write_text(yaml.safe_dump(found))

    def deploy(self, command: str) -> str:
        """What a command about the file printed on stdout; all it said is kept."""
        limit = ("--timeout", f"{LIMIT_S:.0f}") if command == "up" else ()
        return self._run(command, "-f", str(self.file), *limit)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._run("status", "--json", "-f", str(self.file)))
        return found

    def note(self, text: str) -> None:
        """For readers of the transcript."""
        self.said.append(f"# {text}\n")

    def write_transcript(self) -> None:
        """To the file that TRANSCRIPT names, without what only holds here."""
        if path := os.environ.get("TRANSCRIPT"):
            text = "\n".join(said for said in self.said if "--json" not in said)
            text = text.replace(str(self.folder / "c"), "mycluster").replace(self.key, "or-...")
            Path(path).write_text(re.sub(r"outrider-\d+", "outrider", text))

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [*COMMAND, *words],
            env=os.environ | {"RAY_TMPDIR": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S + 60,
        )
        self.said.append(f"$ outrider deploy {' '.join(words)}\n{done.stderr}{done.stdout}")
        assert done.returncode == 0, f"{self.said[-1]}\n{self._log()}"
        return done.stdout

    def _log(self) -> str:
        log = self.file.with_name("cluster.yaml.log")
        return log.read_text()[-4000:] if log.exists() else ""
