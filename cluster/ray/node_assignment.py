"""Assigns the ranks of each role to nodes, by free resources and labels.

Pure: `outrider.cluster.ray.placement` reserves the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.cluster.ray.facts import Node, Resources

_KIND = "ray.io/accelerator-type"
_GB = 2**30
# GPU memory by Ray's accelerator type; the largest where variants differ, so that nothing feasible
# is refused. Unknown types are not checked.
_KIND_GB = {
    "P4": 8, "K80": 12, "P100": 16, "T4": 16, "V100": 32, "A10G": 24, "L4": 24, "L40S": 48,
    "A100": 80, "A100-40G": 40, "A100-80G": 80, "H100": 96, "H20": 141, "H200": 141, "B200": 192,
    "GB200": 192, "B300": 288, "GB300": 288, "RTX-PRO-6000": 96,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Need:
    """The resources that the ranks of one role need, or an engine that holds the models."""

    role: str
    num_ranks: int
    per_rank: Resources
    labels: Mapping[str, str] = field(default_factory=dict)  # required of a node
    gpu_bytes: int | None = None  # minimum memory of each GPU; None if unknown
    model: str = field(default="", compare=False)  # by name

    @property
    def total(self) -> Resources:
        return {name: self.num_ranks * amount for name, amount in self.per_rank.items()}

    def is_welcome_at(self, node: Node) -> bool:
        """Whether its labels allow the node."""
        return all(node.labels.get(key) == value for key, value in self.labels.items())

    def is_too_large_for(self, node: Node) -> bool:
        """Whether the node's kind of GPU is known to have too little memory."""
        has = gpu_bytes_of(node)
        return self.gpu_bytes is not None and has is not None and self.gpu_bytes > has


@dataclass(frozen=True, slots=True)
class NodeAssignment:
    """A node for each rank of one role."""

    need: Need
    node_ids: tuple[str, ...]

    @property
    def is_one_node(self) -> bool:
        return len(set(self.node_ids)) == 1


def gpu_bytes_of(node: Node) -> int | None:
    """The memory of one of its GPUs; None if their type is unknown."""
    gb = _KIND_GB.get(node.labels.get(_KIND, ""))
    return None if gb is None else gb * _GB


def as_if_empty(nodes: Sequence[Node]) -> list[Node]:
    """The same nodes with all resources free."""
    return [Node(each.id, each.ip, each.labels, each.has, each.has) for each in nodes]


def assign_nodes(
    needs: Sequence[Need], nodes: Sequence[Node], near: Collection[str] = ()
) -> list[NodeAssignment] | None:
    """An assignment of all needs at once, or None.

    Prefers one node for the ranks of a role, the first role's nodes for the second, and nodes in
    `near` for a single role. Among equals, best fit: large free nodes stay whole.
    """
    free = _FreeResources(nodes)
    if len(needs) == 1:
        only = free.choose(needs[0], near)
        return None if only is None else [only]
    first, second = needs
    found_pairs: list[tuple[NodeAssignment, NodeAssignment]] = [
        (assignment, other)
        for assignment in free.options(first)
        if (other := free.without(assignment).choose(second, assignment.node_ids)) is not None
    ]
    # If labels confine the second to some nodes, the first must leave these free.
    if not found_pairs and (other := free.choose(second, ())) is not None:
        assignment = free.without(other).choose(first, other.node_ids)
        found_pairs = [] if assignment is None else [(assignment, other)]
    if not found_pairs:
        return None
    best = min(found_pairs, key=lambda pair: _preference(pair[0], pair[1], free))
    return list(best)


def _preference(
    assignment: NodeAssignment, other: NodeAssignment, free: _FreeResources
) -> tuple[object, ...]:
    is_remote = not set(other.node_ids) <= set(assignment.node_ids)
    return not assignment.is_one_node, is_remote, not other.is_one_node, free.left_by(assignment)


class _FreeResources:
    """The free resources of nodes."""

    def __init__(
        self, nodes: Sequence[Node], left: Mapping[str, dict[str, float]] | None = None
    ) -> None:
        self._nodes = nodes
        self._left = left or {node.id: dict(node.free) for node in nodes}

    def without(self, assignment: NodeAssignment) -> _FreeResources:
        left = {node_id: dict(amounts) for node_id, amounts in self._left.items()}
        for node_id in assignment.node_ids:
            for name, amount in assignment.need.per_rank.items():
                left[node_id][name] = left[node_id].get(name, 0.0) - amount
        return _FreeResources(self._nodes, left)

    def choose(self, need: Need, near: Collection[str]) -> NodeAssignment | None:
        return min(
            self.options(need, near),
            default=None,
            key=lambda assignment: (
                not set(assignment.node_ids) <= set(near),
                not assignment.is_one_node,
                self.left_by(assignment),
            ),
        )

    def options(self, need: Need, near: Collection[str] = ()) -> Iterator[NodeAssignment]:
        """Each single node that fits all ranks, then the fewest nodes that fit them together."""
        counts = {node.id: self._num_ranks(need, node) for node in self._nodes}
        for node_id, count in counts.items():
            if count >= need.num_ranks:
                yield NodeAssignment(need, (node_id,) * need.num_ranks)
        ids: list[str] = []
        for node_id in sorted(counts, key=lambda each: (each not in near, -counts[each])):
            ids += [node_id] * min(counts[node_id], need.num_ranks - len(ids))
        if len(ids) == need.num_ranks and len(set(ids)) > 1:
            yield NodeAssignment(need, tuple(ids))

    def left_by(self, assignment: NodeAssignment) -> tuple[float, float]:
        """GPUs and CPUs left over on its nodes."""
        left = self.without(assignment)._left
        ids = set(assignment.node_ids)
        gpus, cpus = (sum(left[each].get(name, 0.0) for each in ids) for name in ("GPU", "CPU"))
        return gpus, cpus

    def _num_ranks(self, need: Need, node: Node) -> int:
        if not need.is_welcome_at(node) or need.is_too_large_for(node):
            return 0
        left = self._left[node.id]
        fits = (int(left.get(name, 0.0) // amount) for name, amount in need.per_rank.items())
        return min(fits)
