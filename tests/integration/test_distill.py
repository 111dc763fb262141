"""`outrider distill` from chance to a bar, at toy size, and across a kill."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_tools import save_toy_target

from outrider.cli.distill import sizes_of
from outrider.errors import ConfigError
from outrider.train import data as data_module
from outrider.train.data import make_data
from outrider.train.distill import CHECKPOINT, TRAINING, DistillationPlan, distill
from outrider.train.progress import ProgressReporter
from outrider.train.settings import DataSettings, EvaluationSettings, TrainSettings
from outrider.train.shards import Manifest, write_shard
from outrider.train.trainer import STATE

pytestmark = pytest.mark.model
STEPS = 50
DATA = DataSettings(
    conversations=48, held_out=12, shard_size=48, context=96, user_tokens=8, answer_tokens=40
)
TRAIN = TrainSettings(
    steps=STEPS, batch_tokens=768, context=96, learning_rate=1e-2, save_every=10, chunk_rows=1024
)
EVALUATION = EvaluationSettings(depth=3, tokens=24)
SIZES: dict[str, dict[str, Any]] = {
    "draft": {"layers": 1, "width": 64, "heads": 2, "intermediate": 64},
    "eagle3": {"draft_vocab": 36, "unroll": 2},
    "medusa": {"heads": 2},
    "mlp": {"predict": 2},
}
# Tokens a round, greedy, at depth 3 or as deep as there are heads. Chance is 1.0: an untrained
# student's drafts are never right.
BARS = {"draft": 3.0, "eagle3": 2.4, "medusa": 2.0, "mlp": 2.4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the target, and in time with its texts."""
    made = tmp_path_factory.mktemp("distill")
    (made / "target").mkdir()
    save_toy_target(made / "target")
    return made


def plan(kind: str, folder: Path, out: str, **changes: Any) -> DistillationPlan:
    steps = changes.pop("steps", STEPS)
    train = dataclasses.replace(TRAIN, steps=steps)
    return DistillationPlan(
        kind=kind,
        target=str(folder / "target"),
        out=folder / out,
        data_folders=(folder / "data",),
        data=DATA,
        train=train,
        sizes=sizes_of(kind, SIZES[kind]),
        evaluation=EVALUATION,
        device="cpu",
        **changes,
    )


def weights(out: Path) -> str:
    [file] = (out / CHECKPOINT).glob("*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", BARS)
def test_a_student_goes_from_chance_to_its_bar(kind: str, folder: Path) -> None:
    report = distill(plan(kind, folder, kind), ProgressReporter(quiet=True))
    acceptance = report["acceptance"]
    assert "not_measured" not in acceptance, acceptance
    assert acceptance["greedy"]["all"]["tokens_a_round"] >= BARS[kind]
    assert acceptance["greedy"]["by_prompt_length"].keys() == {"up to 256"}
    assert report["agreement"]["agreement"][0] > 0.8
    held_out = [entry["held_out"][0] for entry in report["history"] if "held_out" in entry]
    assert len(held_out) == STEPS // TRAIN.save_every and held_out[-1] < held_out[0]
    assert json.loads((folder / kind / "report.json").read_text()) == report
    assert "| all | " in (folder / kind / "report.md").read_text()


def test_an_untrained_student_does_not_reach_the_bar(folder: Path) -> None:
    report = distill(plan("draft", folder, "untrained", steps=1), ProgressReporter(quiet=True))
    assert report["acceptance"]["greedy"]["all"]["tokens_a_round"] < 1.2
    assert report["agreement"]["agreement"][0] < 0.1


def test_data_whose_making_was_cut_off_goes_on_to_the_same_shards(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(DATA, conversations=12, held_out=2, shard_size=4)
    target, reporter = str(folder / "target"), ProgressReporter(quiet=True)
    make_data(tmp_path / "whole", target, settings, "cpu", reporter)

    def cut_off(path: Path, *rest: Any) -> None:
        if path.name == "shard-00001.bin":
            raise KeyboardInterrupt
        write_shard(path, *rest)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(data_module, "write_shard", cut_off)
        make_data(tmp_path / "cut", target, settings, "cpu", reporter)
    begun = Manifest.load(tmp_path / "cut")
    assert begun is not None and len(begun.shards) == 1 and not begun.is_complete
    with pytest.raises(ConfigError, match="--seed is 1, and .* was begun with 0; give the same"):
        make_data(tmp_path / "cut", target, dataclasses.replace(settings, seed=1), "cpu", reporter)
    make_data(tmp_path / "cut", target, settings, "cpu", reporter)
    for file in sorted((tmp_path / "whole").iterdir()):
        assert file.read_bytes() == (tmp_path / "cut" / file.name).read_bytes(), file.name


def test_a_state_of_other_settings_is_not_gone_on_with(folder: Path) -> None:
    if not (folder / "untrained" / CHECKPOINT).exists():
        distill(plan("draft", folder, "untrained", steps=1), ProgressReporter(quiet=True))
    with pytest.raises(ConfigError, match="was begun with steps 1, and now it is 2; give the same"):
        distill(
            plan("draft", folder, "untrained", steps=2, resume=True), ProgressReporter(quiet=True)
        )


def command(folder: Path, out: Path) -> list[str]:
    options = {
        "target": folder / "target",
        "out": out,
        "data": folder / "data",
        "phase": "train",
        "device": "cpu",
        **{name: getattr(DATA, name) for name in ("conversations", "context")},
        **{name: getattr(TRAIN, name) for name in ("steps", "batch_tokens", "learning_rate")},
        **{name: getattr(TRAIN, name) for name in ("save_every", "chunk_rows")},
        **SIZES["draft"],
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "outrider", "distill", "draft", *flags]


def test_a_training_that_is_killed_goes_on_to_the_same_weights(folder: Path) -> None:
    undisturbed, out = folder / "draft", folder / "killed"
    if not (undisturbed / CHECKPOINT).exists():
        distill(plan("draft", folder, "draft"), ProgressReporter(quiet=True))
    on_progress = folder / "killed.log"
    with on_progress.open("w") as log:
        child = subprocess.Popen(
            command(folder, out), env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=log
        )
    try:
        limit_s = time.monotonic() + 120
        while not (out / TRAINING / STATE).exists():
            assert child.poll() is None, on_progress.read_text()
            assert time.monotonic() < limit_s, "no state was saved"
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait(timeout=30)
    state = torch.load(out / TRAINING / STATE, weights_only=True)
    assert 0 < state["step"] < STEPS and not (out / CHECKPOINT).exists()
    distill(
        plan("draft", folder, "killed", resume=True, phases=("train",)),
        ProgressReporter(quiet=True),
    )
    assert weights(out) == weights(undisturbed)
