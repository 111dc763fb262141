"""How long a server waits for the controller's news, by what Ray says of that actor meanwhile."""

from __future__ import annotations

SILENCE_S = 10.0  # for news that are asked for twice a second
RESTART_S = 120.0  # for Ray to have a new process run
_STARTING = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING")


def patience_s(state: str | None) -> float:
    """Seconds since the last news until the actor is given up; `state` is what Ray says of it,
    empty if Ray does not know it and None if Ray does not answer."""
    if state in _STARTING:
        return RESTART_S
    is_gone = state in ("", "DEAD")
    return 0.0 if is_gone else SILENCE_S


def reason_of(state: str | None, silent_s: float) -> str:
    """In words, once the actor is given up."""
    if state is None:
        return f"neither Ray nor the controller has answered for {silent_s:.0f} s"
    if state == "":
        return "Ray does not know the controller any more; its head was started anew"
    if state == "DEAD":
        return "the controller is lost"
    return f"the controller has not answered for {silent_s:.0f} s ({state.lower()})"
