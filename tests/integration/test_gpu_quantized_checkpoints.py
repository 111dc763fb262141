"""GPU kernels with checkpoints that are quantized."""

from __future__ import annotations

import pytest
from gpu_tools import DEVICE, GPU_MARKS
from quantized_checkpoints import ALL_FORMS, Saved, assert_alike, write

from outrider.kernels.gpu.ops import GpuOps

pytestmark = [pytest.mark.model, *GPU_MARKS]


@pytest.fixture(scope="module", params=ALL_FORMS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("fp8")
    return Saved(folder, write(folder, ALL_FORMS[request.param]))


def test_logits_of_gpu_kernels_are_what_the_checkpoint_means(saved: Saved) -> None:
    assert_alike(saved, GpuOps, DEVICE, lengths=(1, 9))


@pytest.mark.slow
def test_logits_of_deterministic_gpu_kernels_are_what_the_checkpoint_means(saved: Saved) -> None:
    assert_alike(saved, lambda: GpuOps(deterministic=True), DEVICE)
