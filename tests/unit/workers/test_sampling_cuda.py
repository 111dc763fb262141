"""The same code on CUDA tensors: the same choices as on the CPU, and bitwise batch independence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.kernels.reference import ReferenceOps
from outrider.scheduler.params import SamplingParams
from outrider.workers.sampling.chain import process
from outrider.workers.sampling.draft import draft_sample
from outrider.workers.sampling.logprobs import token_logprobs
from outrider.workers.sampling.rows import LogitSpan, RowSampler
from outrider.workers.sampling.verify import VerificationMode, verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 49_152
OPS = ReferenceOps()
PARAMETERS: list[dict[str, Any]] = [
    dict(temperature=0.0),
    dict(temperature=0.7),
    dict(top_k=50, top_p=0.9),
    dict(top_p=0.95),
    dict(min_p=0.05, frequency_penalty=0.5, repetition_penalty=1.2),
    dict(temperature=0.0, logit_bias={5: 3.0}, allowed_token_ids=[5, 6, 7, 4000], min_tokens=9),
]


def spans_on(device: str, with_q: bool = False) -> list[LogitSpan]:
    spans = []
    for seed, params in enumerate(PARAMETERS):
        sampler = RowSampler(
            SamplingParams(**params), seed, 3, (7,), ((9, 4),), VOCAB, torch.device(device)
        )
        q = logits_on(device)[:2].softmax(-1) if with_q else None
        spans.append(LogitSpan(sampler, [1, 2, 3, 8, 9, 9], [9, 4], q))
    return spans


def logits_on(device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(3 * len(PARAMETERS), VOCAB, generator=generator) * 4).to(device)


def test_scores_on_the_gpu_are_those_of_the_cpu() -> None:
    on_gpu = process(logits_on("cuda"), spans_on("cuda")).cpu()
    on_cpu = process(logits_on("cpu"), spans_on("cpu"))
    assert torch.equal(on_gpu.isfinite(), on_cpu.isfinite())
    torch.testing.assert_close(on_gpu, on_cpu)


@pytest.mark.parametrize("mode", ["shared", "rejection"])
def test_verdicts_on_the_gpu_are_those_of_the_cpu(mode: VerificationMode) -> None:
    verdicts = [
        verify(logits_on(device), spans_on(device, mode == "rejection"), OPS, mode)
        for device in ("cuda", "cpu")
    ]
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize("mode", ["shared", "rejection"])
def test_drafts_on_the_gpu_are_those_of_the_cpu(mode: VerificationMode) -> None:
    steps = [
        draft_sample(logits_on(device)[: len(PARAMETERS)], spans_on(device), OPS, mode)
        for device in ("cuda", "cpu")
    ]
    assert steps[0].tokens.tolist() == steps[1].tokens.tolist()
    torch.testing.assert_close(steps[0].confidence.cpu(), steps[1].confidence)


def test_a_row_on_the_gpu_does_not_depend_on_the_rest_of_the_batch() -> None:
    spans, logits = spans_on("cuda"), logits_on("cuda")
    together = process(logits, spans)
    for i, span in enumerate(spans):
        rows = slice(3 * i, 3 * i + 3)
        assert torch.equal(process(logits[rows].clone(), [span]), together[rows])


def test_logprobs_on_the_gpu_are_those_of_the_cpu() -> None:
    entries = [token_logprobs(logits_on(device)[:2], [5, 9], 3) for device in ("cuda", "cpu")]
    for on_gpu, on_cpu in zip(*entries, strict=True):
        assert (on_gpu.token_id, on_gpu.rank) == (on_cpu.token_id, on_cpu.rank)
        assert on_gpu.logprob == pytest.approx(on_cpu.logprob, abs=1e-4)
