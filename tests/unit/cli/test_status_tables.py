"""What `outrider status` shows of several replicas."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from outrider.api_types.results import ReplicaStatus
from outrider.cli.status_tables import processes_table, replicas_table
from outrider.links.cluster_view import ClusterView, ProcessView
from outrider.links.gateway_messages import EngineStatus

ENGINE = EngineStatus(
    query=0,
    ranks=(),
    proposal_backend="",
    proposal_sends=0,
    draft_losses=0,
    running=3,
    waiting=1,
    kv_blocks_used=16,
    kv_blocks=64,
    steps=1,
    committed_tokens=1,
    drafted_tokens=8,
    accepted_tokens=6,
    preemptions=0,
)
REPLICAS = (
    ReplicaStatus("host-1-aa/0", "serving", 4, 0, 2, ENGINE),
    ReplicaStatus("host-1-aa/1", "away", 0, 5, 0, None),
)


def _shown(table: Table) -> list[list[str]]:
    """Lines, cut where there are two blanks."""
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def test_each_replica_has_its_load_memory_acceptance_and_restarts() -> None:
    first, away = _shown(replicas_table(REPLICAS))[1:]
    assert first == ["0", "3", "1", "16 of 64 (25%)", "-", "75.0%", "0 + 2 of the draft", "serving"]
    assert away == ["1", "-", "-", "-", "-", "-", "5", "away"]


def test_names_of_controllers_are_shown_where_there_are_several() -> None:
    other = ReplicaStatus("host-2-bb/0", "serving", 0, 0, 0, None)
    rows = _shown(replicas_table((*REPLICAS, other)))[1:]
    assert [row[0] for row in rows] == ["host-1-aa/0", "host-1-aa/1", "host-2-bb/0"]


def test_processes_are_shown_with_their_replicas_if_there_are_several() -> None:
    processes = (
        ProcessView("gateway", 0, 11, "here", (), 0, "ready"),
        ProcessView("target", 1, 12, "there", ("3",), 5, "ready", "host-1-aa/1"),
    )
    view = ClusterView("outrider serve", "serving", 5, 2, processes)
    title, head, gateway, target = _shown(processes_table(view, REPLICAS))
    assert title == ["outrider serve: serving"] and head[0] == "replica"
    assert gateway == ["-", "gateway", "0", "11", "here", "-", "0", "ready"]
    assert target == ["1", "target", "1", "12", "there", "3", "5", "ready"]
    assert _shown(processes_table(view, REPLICAS[:1]))[1][0] == "process"
