"""Whoever is registered may draft: a toy of each kind, which only this file knows of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from gpu_tools import DEVICE, GPU_MARKS

from outrider import LLM, SamplingParams
from outrider.catalog.proposers import ProposerInfo
from outrider.errors import ConfigError, RequestError
from outrider.kernels.gpu.columns import EntryColumn
from outrider.kernels.gpu.ops import GpuOps
from outrider.scheduler.proposers import Place, ProposerTraits
from outrider.scheduler.types import Proposal, StepPlan, Verdict
from outrider.workers import device
from outrider.workers.gpu.proposing import DeviceContext, DeviceProposer
from outrider.workers.proposers.base import Proposer, ProposerContext
from outrider.workers.proposers.registry import ProposerEntry, register, unregister
from outrider.workers.rows import RowTable

pytestmark = GPU_MARKS

NUM_TOKENS = 16
PROMPTS = [[5, 9, 5, 9], [7, 7, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


class Parrot(Proposer):
    """Guesses that the last token comes again, from the host's texts."""

    def __init__(self, name: str, rows: RowTable) -> None:
        self._name = name
        self._rows = rows

    def follow(self, plan: StepPlan) -> None:
        self._rows.begin(plan)

    def propose(self, plan: StepPlan) -> Mapping[int, Proposal]:
        found = {}
        for row in plan.rows:
            if row.proposer == self._name:
                tokens = self._rows[row.row].tokens
                drafts = [tokens[-1]] * row.depth
                found[row.row] = Proposal(row.generation, len(tokens), drafts, [0.5] * row.depth)
        return found

    def observe(self, verdict: Verdict) -> None:
        self._rows.commit(verdict)


class DeviceParrot(DeviceProposer):
    """The same from the device's."""

    def __init__(self, context: DeviceContext) -> None:
        self._context = context
        self.num_rounds = 0
        self.num_begun = 0

    def begin(self, row: int) -> None:
        self.num_begun += 1

    def draft(self, counts: Sequence[int]) -> None:
        self.num_rounds += 1
        text = self._context.state.text
        rows = self._context.entries.entries[EntryColumn.ROW, : counts[0]].long()
        last = text.tokens[rows, text.lengths[rows].long() - 1]
        text.drafts[rows] = last[:, None].expand(-1, text.drafts.shape[1])


@pytest.fixture
def host_parrot() -> Iterator[str]:
    def build(context: ProposerContext) -> Parrot:
        return Parrot("parrot", context.rows)

    traits = ProposerTraits("parrot", Place.HOST, mark="parrot")
    register(ProposerEntry(ProposerInfo(traits), build))
    yield "parrot"
    unregister("parrot")


@pytest.fixture
def device_parrots() -> Iterator[list[DeviceParrot]]:
    built: list[DeviceParrot] = []

    def build(context: ProposerContext) -> Parrot:
        return Parrot("device_parrot", context.rows)

    def build_on_device(context: DeviceContext) -> DeviceParrot:
        built.append(DeviceParrot(context))
        return built[-1]

    traits = ProposerTraits("device_parrot", Place.DEVICE, mark="parrot")
    register(ProposerEntry(ProposerInfo(traits), build, build_on_device))
    yield built
    unregister("device_parrot")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    save_checkpoint(folder, "llama", **sizes, **heads)
    return folder


def _params(**fields: Any) -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
    # A bias makes the model repeat itself, so that a parrot is right now and then.
    return [
        SamplingParams(temperature=0, logit_bias={7: 100.0}, **common),
        SamplingParams(temperature=0.8, seed=3, **common),
        SamplingParams(temperature=0, **common),
    ]


def _texts(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.model
@pytest.mark.parametrize("lag", [0, 1])
def test_a_registered_host_proposer_drafts_and_changes_no_text(
    host_parrot: str, model: Path, lag: int
) -> None:
    llm = LLM(str(model), deterministic=True, lag=lag, num_speculative_tokens=3)
    plain = _texts(llm, _params())
    assert _texts(llm, _params(speculation=host_parrot)) == plain
    stats = llm.engine.built.loop.scheduler.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.model
@pytest.mark.slow  # in the interpreter
def test_a_registered_device_proposer_writes_the_devices_drafts(
    device_parrots: list[DeviceParrot], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "select_ops", lambda _, __, exact, *___: GpuOps(exact))
    options: dict[str, Any] = {"dtype": "float32", "device": DEVICE.type, "deterministic": True}
    sizes = {"kv_cache_gb": 0.01, "max_model_len": 64, "max_num_seqs": 3}
    llm = LLM(
        str(model),
        lag=1,
        num_speculative_tokens=3,
        max_num_batched_tokens=32,
        log_level="error",
        **options,
        **sizes,
    )
    with torch.inference_mode():
        plain = _texts(llm, _params())
        assert _texts(llm, _params(speculation="device_parrot")) == plain
    assert device_parrots[-1].num_rounds > 0
    assert device_parrots[-1].num_begun == 2 * len(PROMPTS)
    stats = llm.engine.built.loop.scheduler.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.model
def test_a_name_nobody_registered_is_refused(model: Path) -> None:
    llm = LLM(str(model))
    with pytest.raises(RequestError, match="speculation is 'parrot'.*'ngram' or 'off'"):
        llm.generate([[1]], SamplingParams(speculation="parrot"))


def test_a_name_is_registered_once() -> None:
    entry = ProposerEntry(
        ProposerInfo(ProposerTraits("ngram", Place.HOST)),
        lambda context: Parrot("ngram", context.rows),
    )
    with pytest.raises(ConfigError, match="'ngram' is registered already"):
        register(entry)
