"""Which nodes have room for the ranks of each role: by what they have free, and by their labels.

Pure: `outrider.cluster.placement` reserves what is found here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.cluster.ray_facts import Node, Resources

_KIND = "ray.io/accelerator-type"
_GB = 2**30
# What GPUs of a kind have, as Ray names them; the most where there are several, as what could work
# is not refused. A kind that is not here is not judged.
_KIND_GB = {
    "P4": 8, "K80": 12, "P100": 16, "T4": 16, "V100": 32, "A10G": 24, "L4": 24, "L40S": 48,
    "A100": 80, "A100-40G": 40, "A100-80G": 80, "H100": 96, "H20": 141, "H200": 141, "B200": 192,
    "GB200": 192, "B300": 288, "GB300": 288, "RTX-PRO-6000": 96,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Need:
    """What the ranks of one role take, or an engine that holds the models."""

    role: str
    num_ranks: int
    per_rank: Resources
    labels: Mapping[str, str] = field(default_factory=dict)  # that a node must have
    gpu_bytes: int | None = None  # the least memory of a GPU for it; None if that is not known
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
class Room:
    """Where the ranks of one role fit: a node for each."""

    need: Need
    node_ids: tuple[str, ...]

    @property
    def is_one_node(self) -> bool:
        return len(set(self.node_ids)) == 1


def gpu_bytes_of(node: Node) -> int | None:
    """The memory of one of its GPUs, if their kind is known."""
    gb = _KIND_GB.get(node.labels.get(_KIND, ""))
    return None if gb is None else gb * _GB


def as_if_empty(nodes: Sequence[Node]) -> list[Node]:
    """The same with nothing taken."""
    return [Node(each.id, each.ip, each.labels, each.has, each.has) for each in nodes]


def find_rooms(
    needs: Sequence[Need], nodes: Sequence[Node], near: Collection[str] = ()
) -> list[Room] | None:
    """Room for all of them at once, or None.

    The ranks of a role are kept on one node where they fit, a second role on the nodes of the
    first, and a lonely one on those that are `near`; of equals the fullest is taken, so that large
    rooms stay whole.
    """
    free = _Free(nodes)
    if len(needs) == 1:
        only = free.choose(needs[0], near)
        return None if only is None else [only]
    first, second = needs
    found_pairs: list[tuple[Room, Room]] = [
        (room, other)
        for room in free.options(first)
        if (other := free.without(room).choose(second, room.node_ids)) is not None
    ]
    # Where the second may only be on some nodes, the first must leave these to it.
    if not found_pairs and (other := free.choose(second, ())) is not None:
        room = free.without(other).choose(first, other.node_ids)
        found_pairs = [] if room is None else [(room, other)]
    if not found_pairs:
        return None
    best = min(found_pairs, key=lambda pair: _preference(pair[0], pair[1], free))
    return list(best)


def _preference(room: Room, other: Room, free: _Free) -> tuple[object, ...]:
    is_apart = not set(other.node_ids) <= set(room.node_ids)
    return not room.is_one_node, is_apart, not other.is_one_node, free.left_by(room)


class _Free:
    """What nodes have left."""

    def __init__(
        self, nodes: Sequence[Node], left: Mapping[str, dict[str, float]] | None = None
    ) -> None:
        self._nodes = nodes
        self._left = left or {node.id: dict(node.free) for node in nodes}

    def without(self, room: Room) -> _Free:
        left = {node_id: dict(amounts) for node_id, amounts in self._left.items()}
        for node_id in room.node_ids:
            for name, amount in room.need.per_rank.items():
                left[node_id][name] = left[node_id].get(name, 0.0) - amount
        return _Free(self._nodes, left)

    def choose(self, need: Need, near: Collection[str]) -> Room | None:
        return min(
            self.options(need, near),
            default=None,
            key=lambda room: (
                not set(room.node_ids) <= set(near),
                not room.is_one_node,
                self.left_by(room),
            ),
        )

    def options(self, need: Need, near: Collection[str] = ()) -> Iterator[Room]:
        """Every node that has room for all ranks, and the fewest nodes that have it together."""
        counts = {node.id: self._num_ranks(need, node) for node in self._nodes}
        for node_id, count in counts.items():
            if count >= need.num_ranks:
                yield Room(need, (node_id,) * need.num_ranks)
        ids: list[str] = []
        for node_id in sorted(counts, key=lambda each: (each not in near, -counts[each])):
            ids += [node_id] * min(counts[node_id], need.num_ranks - len(ids))
        if len(ids) == need.num_ranks and len(set(ids)) > 1:
            yield Room(need, tuple(ids))

    def left_by(self, room: Room) -> tuple[float, float]:
        """GPUs and CPUs that are left over on its nodes."""
        left = self.without(room)._left
        ids = set(room.node_ids)
        gpus, cpus = (sum(left[each].get(name, 0.0) for each in ids) for name in ("GPU", "CPU"))
        return gpus, cpus

    def _num_ranks(self, need: Need, node: Node) -> int:
        if not need.is_welcome_at(node) or need.is_too_large_for(node):
            return 0
        left = self._left[node.id]
        fits = (int(left.get(name, 0.0) // amount) for name, amount in need.per_rank.items())
        return min(fits)
