"""The bundled target with its weights as their file stores them."""

from __future__ import annotations

import pytest
import torch
from checkpoints import RaggedRun
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.checkpoints.resolve import BUNDLED_TARGET, draft_assets
from outrider.kernels.ops import select_ops
from outrider.workers.weights.checkpoint import whole_folder
from outrider.workers.weights.loader import load_model

pytestmark = pytest.mark.model

TEXT = """The history of the steam engine begins in the first century. In 1712 Thomas Newcomen
built an engine that could pump water out of mines, and def fibonacci(n): return n if n < 2"""


def test_logits_of_the_bundled_target_are_those_of_transformers_in_float64() -> None:
    ops = select_ops(torch.device("cpu"), torch.float32)
    if ops.packing is None:
        pytest.skip("the C kernels need a C compiler (cc or gcc), and there is none on PATH")
    decoder = load_model(
        BUNDLED_TARGET, dtype=torch.float32, device="cpu", ops=ops, keeps_stored_format=True
    )
    prompt = AutoTokenizer.from_pretrained(draft_assets())(TEXT)["input_ids"]
    folder = whole_folder(BUNDLED_TARGET)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    ours = RaggedRun(decoder, [prompt]).run(chunk=5)[0]
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-4)
    assert torch.equal(RaggedRun(decoder, [prompt]).run(chunk=len(prompt))[0], ours)
