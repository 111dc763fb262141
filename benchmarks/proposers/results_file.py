"""Results of a run, printed and written to disk one by one."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from outrider.benchmarks.checkout import commit

PARTS = ("rounds", "speed", "enlarged_short", "enlarged_long")


class ResultsFile:
    """The results of a run by part. Parts of earlier runs in the file stay until they are measured
    again; each part records its conditions."""

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self._path = path
        self._about = about
        has_some = path is not None and path.exists()
        self.results: dict[str, Any] = json.loads(path.read_text()) if path and has_some else {}
        self._start_s = time.perf_counter()

    def add_about(self, **about: Any) -> None:
        """Add to the conditions of all parts from now on."""
        self._about = {**self._about, **about}

    def begin_part(self, part: str, **about: Any) -> None:
        self.results[part] = {"about": {**self._about, **about}, "records": []}

    def add_record(self, part: str, record: dict[str, Any]) -> None:
        self.results[part]["records"].append(record)
        self.save()

    def log(self, line: str) -> None:
        print(f"{time.perf_counter() - self._start_s:6.1f} s  {line}", flush=True)

    def save(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self.results, indent=1) + "\n")


def machine_facts(device: str) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
