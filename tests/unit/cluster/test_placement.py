"""What ranks need of a cluster, and what is said when it has too little."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from quantized_checkpoints import ALL_FORMS, write

from outrider.cluster.errors import PlacementError
from outrider.cluster.ray import placement
from outrider.cluster.ray.capacity import PASS_BYTES
from outrider.cluster.ray.facts import Node
from outrider.cluster.ray.node_assignment import Need, assign_nodes
from outrider.cluster.ray.placement import RolePlacement, needs_of, settle_devices
from outrider.cluster.ray.placement_errors import gpus_too_small, insufficient_resources
from outrider.config import EngineConfig
from outrider.errors import ConfigError

CPU = {"CPU": 1.0}
GPU = {"GPU": 1.0, "CPU": 1.0}


def _config(**options: object) -> EngineConfig:
    return EngineConfig.from_kwargs(model="big", draft_model="small", **options)


def test_every_rank_needs_a_bundle_of_its_own() -> None:
    config = settle_devices(_config(tensor_parallel_size=2), has_gpus=False)
    assert needs_of(config) == [Need("target", 2, CPU), Need("draft", 1, CPU)]


def test_auto_is_a_gpu_where_the_cluster_has_any() -> None:
    config = settle_devices(_config(), has_gpus=True)
    assert (config.target.device, config.draft.device) == ("cuda", "cuda")
    assert needs_of(config) == [Need("target", 1, GPU), Need("draft", 1, GPU)]


def test_the_drafts_auto_is_the_targets_device() -> None:
    config = settle_devices(_config(device="cpu"), has_gpus=True)
    assert config.draft.device == "cpu"


def test_a_draft_may_stay_on_the_cpu() -> None:
    config = settle_devices(_config(draft_device="cpu"), has_gpus=True)
    assert needs_of(config) == [Need("target", 1, GPU), Need("draft", 1, CPU)]


def test_a_gpu_by_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="target.device is 'cuda:1' but Ray chooses"):
        settle_devices(_config(device="cuda:1"), has_gpus=True)


def test_without_a_draft_only_the_target_is_placed() -> None:
    config = settle_devices(EngineConfig.from_kwargs(model="big"), has_gpus=False)
    assert [need.role for need in needs_of(config)] == ["target"]


@pytest.mark.parametrize(
    ("device", "bundle"), [("cuda", {"GPU": 1.0, "CPU": 2.0}), ("cpu", {"CPU": 2.0})]
)
def test_an_engine_with_its_models_is_one_bundle(device: str, bundle: dict[str, float]) -> None:
    config = settle_devices(_config(colocate=True, device=device), has_gpus=True)
    assert needs_of(config) == [Need("engine", 1, bundle)]


def test_a_colocated_target_alone_takes_one_cpu() -> None:
    config = EngineConfig.from_kwargs(model="big", device="cpu", colocate=True)
    assert needs_of(config) == [Need("engine", 1, CPU)]


def test_a_draft_elsewhere_is_refused_once_the_targets_device_is_known() -> None:
    with pytest.raises(ConfigError, match="^draft.device is 'cpu' but cluster.colocate is true"):
        settle_devices(_config(colocate=True, draft_device="cpu"), has_gpus=True)


# -- which nodes ------------------------------------------------------------------------------


def _node(name: str, gpus: float = 0.0, cpus: float = 8.0, **labels: str) -> Node:
    has = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    named = {key.replace("kind", "ray.io/accelerator-type"): value for key, value in labels.items()}
    return Node(name, f"10.0.0.{name}", named, has, has)


def _busy(node: Node, **free: float) -> Node:
    return dataclasses.replace(node, free={**node.free, **free})


def _where(needs: list[Need], *nodes: Node) -> list[tuple[str, ...]] | None:
    assignments = assign_nodes(needs, nodes)
    return None if assignments is None else [assignment.node_ids for assignment in assignments]


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([_node("a", 3)], [("a", "a"), ("a",)]),
        ([_node("a", 2), _node("b", 3)], [("b", "b"), ("b",)]),  # the draft beside its target
        ([_node("a", 2), _node("b", 1)], [("a", "a"), ("b",)]),  # or elsewhere
        ([_node("a", 8), _node("b", 4)], [("b", "b"), ("b",)]),  # large nodes stay whole
        ([_node("a", 1), _node("b", 1), _node("c", 1)], [("a", "b"), ("c",)]),
        ([_node("a", 1), _node("b", 2, cpus=1.0)], None),
        ([_node("a", 1), _node("b", 1)], None),
        ([_busy(_node("a", 4), GPU=1.0), _node("b", 2)], [("b", "b"), ("a",)]),
    ],
)
def test_ranks_stay_together_and_a_draft_near_its_target(
    nodes: list[Node], found: list[tuple[str, ...]] | None
) -> None:
    assert _where([Need("target", 2, GPU), Need("draft", 1, GPU)], *nodes) == found


def test_labels_keep_each_role_to_its_nodes() -> None:
    target = Need("target", 1, GPU, {"pool": "large"})
    draft = Need("draft", 1, GPU, {"pool": "small"})
    nodes = [_node("a", 4, pool="small"), _node("b", 4, pool="large"), _node("c", 4)]
    assert _where([target, draft], *nodes) == [("b",), ("a",)]
    assert _where([Need("target", 1, GPU), draft], nodes[0], nodes[1]) == [("a",), ("a",)]
    assert _where([target, draft], *nodes[1:]) is None


def test_a_target_leaves_the_only_node_that_its_draft_may_have() -> None:
    draft = Need("draft", 1, GPU, {"pool": "small"})
    nodes = [_node("a", 1, pool="small"), _node("b", 1), _node("c", 1)]
    assert _where([Need("target", 1, GPU), draft], *nodes[:2]) == [("b",), ("a",)]
    assert _where([Need("target", 2, GPU), draft], *nodes) == [("b", "c"), ("a",)]


def test_a_draft_that_is_placed_anew_is_near_its_target_if_it_can_be() -> None:
    draft = Need("draft", 1, GPU)
    nodes = [_node("a", 1), _node("b", 8)]
    [near] = assign_nodes([draft], nodes, near=["b"]) or []
    [elsewhere] = assign_nodes([draft], [nodes[0], _busy(nodes[1], GPU=0.0)], near=["b"]) or []
    assert (near.node_ids, elsewhere.node_ids) == (("b",), ("a",))


def test_a_kind_of_gpu_with_too_little_memory_is_passed_over() -> None:
    target = Need("target", 1, GPU, gpu_bytes=30 * 2**30)
    small, large, unknown = _node("a", 1, kind="L4"), _node("b", 1, kind="A100"), _node("c", 1)
    assert _where([target], small, large) == [("b",)]
    assert _where([target], small) is None
    assert _where([target], small, unknown) == [("c",)]


@pytest.mark.parametrize("given", ["zone", "zone=", "=a", "zone=!a", "zone=in(a)"])
def test_a_label_that_is_none_is_refused(given: str) -> None:
    config = settle_devices(_config(draft_labels=(given,)), has_gpus=False)
    with pytest.raises(ConfigError, match=r"^cluster.draft_labels has .*as zone=a\.$"):
        needs_of(config)


def test_labels_of_the_configuration_are_those_of_the_needs() -> None:
    config = _config(target_labels=("zone=a", "pool=x"), draft_labels=("zone=b",))
    target, draft = needs_of(settle_devices(config, has_gpus=False))
    assert (target.labels, draft.labels) == ({"zone": "a", "pool": "x"}, {"zone": "b"})


# -- what is said -----------------------------------------------------------------------------


def test_the_sentence_names_need_supply_and_remedy() -> None:
    node = _busy(_node("1", 4, 16.0), CPU=12.0, GPU=0.0)
    assert insufficient_resources(Need("target", 8, GPU), [node], 60.0) == (
        "target: 8 ranks need 1 GPU and 1 CPU each, 8 GPUs and 8 CPUs in all, but the cluster has "
        "4 GPUs (0 free) and 16 CPUs (12 free) after 60 s; lower target.tensor_parallel, set "
        "target.device to cpu or use a larger cluster."
    )


def test_of_several_nodes_it_says_what_each_has() -> None:
    nodes = [_busy(_node("1", cpus=2.0), CPU=0.0), _node("2", cpus=1.0)]
    assert insufficient_resources(Need("target", 4, CPU), nodes) == (
        "target: 4 ranks need 1 CPU each, 4 CPUs in all, but the cluster has 3 CPUs (1 free): "
        "10.0.0.1 2 CPUs (0 free), 10.0.0.2 1 CPU (1 free); lower target.tensor_parallel or use a "
        "larger cluster."
    )


def test_with_labels_only_the_nodes_that_have_them_count() -> None:
    draft = Need("draft", 1, CPU, {"zone": "b"})
    nodes = [_node("1", zone="a"), _busy(_node("2", cpus=1.0, zone="b"), CPU=0.0)]
    assert insufficient_resources(draft, nodes) == (
        "draft: 1 rank needs 1 CPU on nodes labelled zone=b, but they have 1 CPU (0 free): "
        "10.0.0.2 1 CPU (0 free); change cluster.draft_labels or use a larger cluster."
    )
    assert "but no node has these labels; change" in insufficient_resources(draft, nodes[:1])


def test_who_is_placed_before_it_is_counted() -> None:
    target, draft = Need("target", 2, GPU), Need("draft", 1, GPU)
    assert insufficient_resources(draft, [_node("1", 2)], beside=[target]) == (
        "draft: 1 rank needs 1 GPU and 1 CPU beside the target's 2 GPUs and 2 CPUs, but the "
        "cluster has 2 GPUs (2 free) and 8 CPUs (8 free); set draft.device to cpu or use a larger "
        "cluster."
    )


def test_one_rank_cannot_be_split_further() -> None:
    sentence = insufficient_resources(Need("draft", 1, CPU), [_busy(_node("1", cpus=1.0), CPU=0.0)])
    assert sentence == (
        "draft: 1 rank needs 1 CPU, but the cluster has 1 CPU (0 free); use a larger cluster."
    )


def test_an_engine_without_room_for_its_models_is_told_which_device_to_change() -> None:
    sentence = insufficient_resources(Need("engine", 1, GPU | {"CPU": 2.0}), [_node("1")])
    assert sentence == (
        "engine: its process with the models needs 1 GPU and 2 CPUs, but the cluster has 0 GPUs "
        "(0 free) and 8 CPUs (8 free); set target.device to cpu or use a larger cluster."
    )


# -- memory of GPUs -----------------------------------------------------------------------------


@pytest.fixture
def eight_billion(tmp_path: Path) -> str:
    """A checkpoint of 16 GB, of which there are only the sizes."""
    shape = {
        "model_type": "llama", "dtype": "bfloat16", "hidden_size": 4096, "vocab_size": 128256,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with (tmp_path / "model-00001-of-00001.safetensors").open("wb") as file:
        file.truncate(16 * 2**30)
    return str(tmp_path)


def _least_gb(model: str, **options: object) -> float:
    config = EngineConfig.from_kwargs(model=model, **options)
    [need] = needs_of(settle_devices(config, has_gpus=True))
    assert need.gpu_bytes is not None
    return need.gpu_bytes / 2**30


def test_a_gpu_needs_memory_for_its_share_of_the_weights_and_some_kv(eight_billion: str) -> None:
    whole = _least_gb(eight_billion)
    assert 18.5 < whole < 19.5  # 16 of weights, 0.85 of passes and KV, in 0.9 of the GPU
    assert 9.3 < _least_gb(eight_billion, tensor_parallel_size=2) < 10.5
    assert 9.5 < _least_gb(eight_billion, quantization="fp8") < 12
    assert 26 < _least_gb(eight_billion, kv_cache_gb=10) < 27
    assert 36 < _least_gb(eight_billion, dtype="float32") < 38
    assert _least_gb(eight_billion, max_model_len=100_000) > whole + 12


@pytest.mark.parametrize("name", ALL_FORMS)
def test_a_quantized_checkpoint_takes_what_its_weights_do(name: str, tmp_path: Path) -> None:
    meant = write(tmp_path, ALL_FORMS[name])
    expected = 0
    for parameter, tensor in meant.named_parameters():
        layer = ALL_FORMS[name].of(parameter.removesuffix(".weight")) if tensor.ndim == 2 else None
        is_native = layer is not None and layer.ints is None and layer.weight != "block"
        expected += tensor.numel() * (1 if is_native and "embed" not in parameter else 2)
    least = _least_gb(str(tmp_path), kv_cache_gb=0.001, dtype="bfloat16") * 2**30
    found = least - PASS_BYTES - 0.001 * 2**30
    assert 0.99 * expected < found < 1.1 * expected  # some count the scales


def test_models_that_fit_no_gpu_there_are_refused_with_what_to_change(eight_billion: str) -> None:
    config = settle_devices(EngineConfig.from_kwargs(model=eight_billion), has_gpus=True)
    [need] = needs_of(config)
    small = _node("1", 4, kind="T4")
    assert gpus_too_small(need, [small]) == (
        f"target: {eight_billion} needs at least 18.7 GB of memory on each GPU, but the largest "
        "there is has 16 GB; raise target.tensor_parallel, set target.quantization or lower "
        "kv_cache_gb."
    )
    assert gpus_too_small(need, [small, _node("2", 1)]) is None  # a kind nobody knows
    assert gpus_too_small(need, [small, _node("2", 1, kind="H100")]) is None
    assert gpus_too_small(need, [_node("1")]) is None  # no GPU at all is another matter


def test_a_checkpoint_that_is_not_at_hand_is_not_judged() -> None:
    [need] = needs_of(settle_devices(EngineConfig.from_kwargs(model="/not/here"), has_gpus=True))
    assert need.gpu_bytes is None


def test_nothing_is_placed_on_a_node_that_is_about_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node(each, "10.0.0.1", {}, {"CPU": 4.0}, {"CPU": 4.0}) for each in ("ends", "stays")]
    asked: list[set[str]] = []

    async def reserve(wanted: Sequence[Any], deadline_s: float) -> dict[str, RolePlacement]:
        asked.append({value for each in wanted for one in each.selectors for value in one.values()})
        return {each.need.role: RolePlacement(each.need, None, ()) for each in wanted}

    monkeypatch.setattr(placement, "live_nodes", lambda: nodes)
    monkeypatch.setattr(placement, "_reserve_all", reserve)
    needs = [Need("target", 1, CPU), Need("draft", 1, CPU)]
    asyncio.run(placement.place(needs, 1.0, can_grow=False, avoid={"ends"}))
    asyncio.run(placement.place(needs, 1.0, can_grow=False, avoid={"stays"}))
    assert asked == [{"stays"}, {"ends"}]
    with pytest.raises(PlacementError):
        asyncio.run(placement.place(needs, 0.0, can_grow=False, avoid={"ends", "stays"}))
