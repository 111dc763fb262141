"""Every family against `transformers`: ragged, chunked, paged on our side; one prompt on theirs."""

from pathlib import Path

import pytest
import torch
from checkpoints import (
    FAMILIES,
    VARIANTS,
    RaggedRun,
    random_prompt,
    reference_logits,
    save_checkpoint,
)

from outrider.kernels.ops import select_ops
from outrider.workers.models.decoder import Decoder
from outrider.workers.weights.loader import load_model

PROMPT_LENGTHS = (1, 7, 60)
CPU = torch.device("cpu")
BACKENDS = ("torch", None)


def load(folder: Path, backend: str | None = None, device: torch.device = CPU) -> Decoder:
    ops = select_ops(device, torch.float32, backend=backend)
    return load_model(folder, dtype=torch.float32, device=device, ops=ops)


@pytest.mark.model
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, variant)
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
    expected = [reference_logits(reference, prompt) for prompt in prompts]
    assert expected[-1].argmax(-1).unique().numel() >= 16
    for backend in BACKENDS:
        decoder = load(tmp_path, backend)
        for chunk in (1000, 5):
            for ours, theirs in zip(RaggedRun(decoder, prompts).run(chunk), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", FAMILIES)
def test_logits_on_a_gpu_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, variant)
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
    decoder = load(tmp_path, device=torch.device("cuda"))
    for ours, prompt in zip(RaggedRun(decoder, prompts).run(5), prompts, strict=True):
        theirs = reference_logits(reference, prompt)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
