"""What ranks need of a cluster, and what is said when it has too little."""

from __future__ import annotations

import pytest

from outrider.cluster.placement import Need, first_misfit, needs_of, no_room, settle_devices
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


@pytest.mark.parametrize(
    ("has", "role"),
    [
        ({"CPU": 8.0, "GPU": 3.0}, None),
        ({"CPU": 8.0, "GPU": 2.0}, "draft"),
        ({"CPU": 8.0, "GPU": 1.0}, "target"),
        ({"CPU": 8.0}, "target"),
        ({"CPU": 2.0, "GPU": 8.0}, "draft"),
    ],
)
def test_the_first_role_without_room_is_found(has: dict[str, float], role: str | None) -> None:
    misfit = first_misfit([Need("target", 2, GPU), Need("draft", 1, GPU)], has)
    assert (None if misfit is None else misfit.role) == role


def test_the_sentence_names_need_supply_and_remedy() -> None:
    has, free = {"CPU": 16.0, "GPU": 4.0}, {"CPU": 12.0}
    assert no_room(Need("target", 8, GPU), has, free, 60.0) == (
        "target: 8 ranks need 1 GPU and 1 CPU each, 8 GPUs and 8 CPUs in all, but the cluster has "
        "4 GPUs (0 free) and 16 CPUs (12 free) after 60 s; lower target.tensor_parallel, set "
        "target.device to cpu or use a larger cluster."
    )


def test_one_rank_cannot_be_split_further() -> None:
    sentence = no_room(Need("draft", 1, CPU), {"CPU": 1.0}, {})
    assert sentence == (
        "draft: 1 rank needs 1 CPU, but the cluster has 1 CPU (0 free); use a larger cluster."
    )


def test_an_engine_without_room_for_its_models_is_told_which_device_to_change() -> None:
    sentence = no_room(Need("engine", 1, GPU | {"CPU": 2.0}), {"CPU": 8.0}, {"CPU": 8.0})
    assert sentence == (
        "engine: its process with the models needs 1 GPU and 2 CPUs, but the cluster has 0 GPUs "
        "(0 free) and 8 CPUs (8 free); set target.device to cpu or use a larger cluster."
    )
