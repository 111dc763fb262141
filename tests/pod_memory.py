"""Memory cgroups of containers, of version 1 or 2, whichever this machine lets us make."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9}
_REMOVAL_S = 10.0
_POLL_S = 0.02


def size_of(quantity: str | int | None) -> int | None:
    """Bytes of a quantity as Kubernetes writes them."""
    if quantity is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]i|[kMG])?", str(quantity))
    assert found is not None, f"{quantity} is no quantity"
    return int(float(found[1]) * _UNITS.get(found[2] or "", 1))


class Memory:
    """A cgroup with one for each container below; `note` says why there is none."""

    def __init__(self, name: str) -> None:
        self.note = ""
        self._is_v1 = (_V1 / "memory.limit_in_bytes").exists()
        self.place = _V1 if self._is_v1 else _V2
        self._parent = self.place / name

    def __enter__(self) -> Memory:
        try:
            if not self._is_v1:
                (_V2 / "cgroup.subtree_control").write_text("+memory")
            self._parent.mkdir(exist_ok=True)
            if not self._is_v1:
                (self._parent / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:
            self.note = f"memory is not limited: {error}"
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def group(self, name: str, limit_bytes: int | None) -> Path | None:
        """The cgroup of a container; a restart has that of before."""
        if self.note:
            return None
        path = self._parent / name
        path.mkdir(exist_ok=True)
        limit = path / ("memory.limit_in_bytes" if self._is_v1 else "memory.max")
        if limit_bytes is not None:
            limit.write_text(str(limit_bytes))
        return path

    def forget(self, pod: str) -> None:
        """Remove the cgroups of a pod that is gone."""
        for each in self._parent.glob(f"{pod}.*"):
            with suppress(OSError):
                each.rmdir()

    def remove(self) -> None:
        """It and those below it, once their last processes have ended."""
        deadline_s = time.monotonic() + _REMOVAL_S
        while self._parent.exists() and time.monotonic() < deadline_s:
            for each in (*(e for e in self._parent.glob("*") if e.is_dir()), self._parent):
                with suppress(OSError):
                    each.rmdir()
            time.sleep(_POLL_S)
