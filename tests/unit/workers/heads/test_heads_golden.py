"""Checkpoints that the `speculators` package wrote, against what it computes with them."""

from pathlib import Path

import pytest
import torch
from checkpoints import ragged_batch
from head_tools import BACKENDS, BLOCK_SIZE, load, target_spec
from safetensors.torch import load_file

from outrider.workers.heads.formats import kind_of, load_head_spec
from outrider.workers.heads.kv import head_kv

pytestmark = pytest.mark.model
GOLDEN = Path(__file__).resolve().parents[3] / "data" / "speculators"
LAYERS = {"llama": (2, 6, 9), "qwen3": (2, 6, 9), "norm_before_fc": (1, 4)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", LAYERS)
def test_a_checkpoint_of_speculators_drafts_what_speculators_drafts(
    variant: str, backend: str | None
) -> None:
    golden = load_file(GOLDEN / f"{variant}.safetensors")
    features, ids = golden["features"], golden["ids"]
    num_steps, num_tokens, _ = golden["states"].shape
    head = load(GOLDEN / variant, target_spec(), backend=backend)
    d2t = load_file(GOLDEN / variant / "model.safetensors")["d2t"]
    known = torch.arange(len(d2t)) + d2t
    # Row i of the golden tensors drafts on from slot i.
    for row in range(num_tokens - num_steps):
        tables = torch.arange(4, dtype=torch.int32)[None]
        kv = head_kv(head.spec, 4, BLOCK_SIZE, torch.float32, "cpu")
        spans = [range(row + 1)]
        batch = ragged_batch(spans, tables, BLOCK_SIZE, head.tile_tokens(row + 1))
        states = head.extend(features[: row + 1], ids[: row + 1], batch, kv)
        expected = golden["states"][0, : row + 1]
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
        state = states[-1:]
        for step in range(num_steps):
            if step > 0:
                at = [range(row + step, row + step + 1)]
                batch = ragged_batch(at, tables, BLOCK_SIZE, head.tile_tokens(1))
                token = ids[row + step : row + step + 1]
                state = head.step(state, token, step, batch, kv)
            expected = golden["states"][step, row]
            torch.testing.assert_close(state[0], expected, rtol=1e-4, atol=1e-4)
            logits = head.logits(state, step)[0]
            expected = golden["logits"][step, row]
            torch.testing.assert_close(logits[known], expected, rtol=1e-4, atol=1e-4)
            assert int(logits.isfinite().sum()) == len(d2t)


@pytest.mark.parametrize(("variant", "layers"), LAYERS.items())
def test_a_checkpoint_of_speculators_is_known_by_its_configuration(
    variant: str, layers: tuple[int, ...]
) -> None:
    assert kind_of(GOLDEN / variant) == "eagle3"
    spec = load_head_spec(GOLDEN / variant, target_spec())
    assert (spec.kind, spec.layers) == ("eagle3", layers)
    assert (spec.hidden_size, spec.state_size, spec.num_kv_heads, spec.head_dim) == (32, 32, 2, 8)
    assert spec.max_depth is None
