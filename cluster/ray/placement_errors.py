"""Error messages for a cluster that lacks resources for a model: demand, supply and a remedy."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cluster.ray.facts import Node, Resources
from outrider.cluster.ray.node_assignment import Need, gpu_bytes_of
from outrider.links.rank_messages import Role

ENGINE = "engine"
_MAX_NODES = 8  # listed one by one


def insufficient_resources(
    need: Need,
    nodes: Sequence[Node],
    waited_s: float | None = None,
    beside: Sequence[Need] = (),
) -> str:
    """One sentence with the free resources of each node that its labels allow. The needs `beside`
    it must fit there as well."""
    what = "its process with the models" if need.role == ENGINE else "1 rank"
    demand = f"{need.role}: {what} needs {_amounts(need.per_rank)}"
    if need.num_ranks > 1:
        each, total = _amounts(need.per_rank), _amounts(need.total)
        demand = f"{need.role}: {need.num_ranks} ranks need {each} each, {total} in all"
    allowed = [node for node in nodes if need.is_welcome_at(node)]
    labels = ", ".join(f"{key}={value}" for key, value in need.labels.items())
    if labels:
        demand += f" on nodes labelled {labels}"
    demand += "".join(f" beside the {each.role}'s {_amounts(each.total)}" for each in beside)
    waited = "" if waited_s is None else f" after {waited_s:g} s"
    remedies = [f"lower {need.role}.tensor_parallel"] if need.num_ranks > 1 else []
    if "GPU" in need.per_rank:
        remedies.append(f"set {_model_role(need)}.device to cpu")
    if labels:
        remedies.append(f"change cluster.{_model_role(need)}_labels")
    remedies.append("use a larger cluster")
    there = _supply(need, allowed, len(nodes) > 1, bool(labels))
    return f"{demand}, but {there}{waited}; {_either(remedies)}."


def gpus_too_small(need: Need, nodes: Sequence[Node]) -> str | None:
    """One sentence if every GPU that its labels allow is known to be too small."""
    allowed = [node for node in nodes if need.is_welcome_at(node) and node.has.get("GPU")]
    if not allowed or not all(map(need.is_too_large_for, allowed)):
        return None
    largest = max(gpu_bytes_of(node) or 0 for node in allowed)
    role = _model_role(need)
    remedies = [f"raise {role}.tensor_parallel", f"set {role}.quantization", "lower kv_cache_gb"]
    if need.role == ENGINE:
        remedies[0] = "set cluster.colocate to false"
    needed_gb = (need.gpu_bytes or 0) / 2**30
    return (
        f"{need.role}: {need.model} needs at least {needed_gb:.3g} GB of memory on each GPU, but "
        f"the largest there is has {largest / 2**30:.3g} GB; {_either(remedies)}."
    )


def _model_role(need: Need) -> str:
    return Role.TARGET if need.role == ENGINE else need.role


def _supply(need: Need, allowed: Sequence[Node], has_several: bool, has_labels: bool) -> str:
    if not allowed:
        return "no node has these labels" if has_labels else "the cluster has no node"
    names = list(need.per_rank)
    has = {name: sum(node.has.get(name, 0.0) for node in allowed) for name in names}
    free = {name: sum(node.free.get(name, 0.0) for node in allowed) for name in names}
    if not has_several:
        return f"the cluster has {_with_free(has, free)}"
    who = "they have" if has_labels else "the cluster has"
    each = [
        f"{node.ip} {_with_free({name: node.has.get(name, 0.0) for name in names}, node.free)}"
        + (" of too little memory" if need.is_too_large_for(node) else "")
        for node in allowed[:_MAX_NODES]
    ]
    if len(allowed) > _MAX_NODES:
        each.append(f"{len(allowed) - _MAX_NODES} more nodes the rest")
    return f"{who} {_with_free(has, free)}: {', '.join(each)}"


def _with_free(has: Resources, free: Resources) -> str:
    return " and ".join(
        f"{_amount(name, amount)} ({free.get(name, 0.0):g} free)" for name, amount in has.items()
    )


def _either(remedies: Sequence[str]) -> str:
    if len(remedies) == 1:
        return remedies[0]
    return f"{', '.join(remedies[:-1])} or {remedies[-1]}"


def _amounts(resources: Resources) -> str:
    return " and ".join(_amount(name, amount) for name, amount in resources.items())


def _amount(name: str, amount: float) -> str:
    return f"{amount:g} {name}" if amount == 1 else f"{amount:g} {name}s"
