"""Replicas and processes of a server as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.api_types.results import ReplicaStatus
    from outrider.links.cluster_view import ClusterView

STATE_STYLES = {
    "ready": "green",
    "serving": "green",
    "lost": "red",
    "away": "red",
    "engine away": "red",
}
_RIGHT = ("rank", "pid", "restarts", "running", "waiting", "depth", "accepted")
_NOTHING = "-"


def processes_table(cluster: ClusterView, replicas: Sequence[ReplicaStatus]) -> Table:
    """The processes as seen by their controller, including engines."""
    names = short_names(replicas)
    has_several = len(replicas) > 1
    columns = ["process", "rank", "pid", "node", "GPUs", "restarts", "state"]
    rows = []
    for each in cluster.processes:
        row = [each.role, str(each.rank), str(each.pid), each.node]
        row += [",".join(each.gpu_ids) or _NOTHING, str(each.restarts), each.state]
        rows.append([names.get(each.replica, each.replica) or _NOTHING] * has_several + row)
    title = f"{cluster.controller}: {cluster.state}"
    return _table(["replica"] * has_several + columns, rows, title)


def replicas_table(replicas: Sequence[ReplicaStatus]) -> Table:
    """State, load and acceptance of each replica."""
    names = short_names(replicas)
    columns = ["replica", "running", "waiting", "KV blocks", "depth", "accepted", "restarts"]
    return _table([*columns, "state"], [_replica_row(each, names) for each in replicas])


def _replica_row(replica: ReplicaStatus, names: dict[str, str]) -> list[str]:
    engine = replica.engine
    restarts = str(replica.restarts)
    if replica.draft_restarts:
        restarts += f" + {replica.draft_restarts} of the draft"
    row = [names[replica.name]]
    if engine is None:
        row += [_NOTHING] * 5
    else:
        share = engine.kv_blocks_used / engine.kv_blocks if engine.kv_blocks else 0.0
        row += [str(engine.running), str(engine.waiting)]
        row.append(f"{engine.kv_blocks_used} of {engine.kv_blocks} ({share:.0%})")
        depth = None if engine.speculation is None else engine.speculation.mean_depth
        row.append(f"{depth:.1f}" if depth else _NOTHING)
        accepted = engine.accepted_tokens / engine.drafted_tokens if engine.drafted_tokens else None
        row.append(_NOTHING if accepted is None else f"{accepted:.1%}")
    return [*row, restarts, replica.state]


def short_names(replicas: Sequence[ReplicaStatus]) -> dict[str, str]:
    """Short names by full name: without the controller if there is only one."""
    controllers = {each.name.rpartition("/")[0] for each in replicas}
    if len(controllers) > 1:
        return {each.name: each.name for each in replicas}
    return {each.name: each.name.rpartition("/")[2] for each in replicas}


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> Table:
    """The last column is a state."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, pad_edge=False, title=title or None, title_justify="left", title_style=""
    )
    for name in columns:
        table.add_column(name, justify="right" if name in _RIGHT else "left")
    for row in rows:
        state = Text(row[-1], STATE_STYLES.get(row[-1], "yellow"))
        table.add_row(*map(Text, row[:-1]), state)
    return table
