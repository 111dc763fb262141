"""What `outrider distill` refuses, each in one sentence, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import save_checkpoint

from outrider import cli
from outrider.cli.distill import layer_numbers, sizes_of
from outrider.errors import ConfigError
from outrider.train.settings import DraftSizes, MlpSizes


def refusal(*options: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(["distill", *options])
    assert caught.value.code in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["draft", "--unroll", "3"], "--unroll does not apply to draft; leave it out."),
        (["medusa", "--width", "64"], "--width does not apply to medusa; leave it out."),
        (["draft", "--width", "100"], "--width is 100 and --heads 3; every head needs the same"),
        (["draft", "--steps", "0"], "--steps is 0; give at least 1."),
        (["draft", "--batch-tokens", "512"], "--batch-tokens is 512, below --context 2048;"),
        (["draft", "--learning-rate", "0"], "both must be above 0."),
        (["eagle3", "--decay", "1.5"], "--decay is 1.5; give a share from 0 to 1."),
        (["draft", "--depth", "9"], "--depth is 9; give at most 8."),
        (["draft", "--phase", "learn"], "--phase is 'learn'; choose from data, train, evaluate."),
        (["draft"], "model '/nowhere' is not there"),
    ],
)
def test_a_bad_option_is_refused_in_a_sentence(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--target", "/nowhere", "--out", str(tmp_path)]
    assert sentence in refusal(*options, *where, capsys=capsys)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    save_checkpoint(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "--context is 2048, and"),
        (["--context", "64"], "--evaluation-tokens is 128, which leaves no room for a prompt"),
        (
            ["--context", "256", "--phase", "train"],
            "which has no manifest.json; let the data be made first",
        ),
        (
            ["--context", "256", "--phase", "evaluate"],
            "which has no finished training; finish it first",
        ),
        (["--context", "256", "--device", "cuda:0"], "but there is no CUDA device; give cpu."),
        (["--context", "256", "--documents", "/nowhere"], "which is not a folder; name one"),
    ],
)
def test_what_does_not_go_with_the_target_or_the_folders_is_refused_in_a_sentence(
    options: list[str],
    sentence: str,
    target: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["draft", "--target", target, "--out", str(tmp_path), "--quiet"]
    assert sentence in refusal(*where, *options, capsys=capsys)


def test_a_training_that_was_begun_is_not_begun_again_by_accident(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "state.pt").write_bytes(b"")
    where = ["draft", "--target", target, "--out", str(tmp_path), "--context", "256"]
    assert "where training has begun; give --resume" in refusal(*where, capsys=capsys)
    damaged = refusal(*where, "--resume", "--phase", "train", capsys=capsys)
    assert "let the data be made first" in damaged


def test_options_that_are_given_are_sizes_of_their_kind() -> None:
    given = {"width": 64, "heads": 2, "layers": None, "predict": None}
    assert sizes_of("draft", given) == DraftSizes(width=64, heads=2)
    assert sizes_of("mlp", {"predict": 3, "tied": False}) == MlpSizes(predict=3, tied=False)


def test_layers_of_the_target_come_with_all_its_sizes() -> None:
    assert sizes_of("draft", {"target_layers": (0, 3)}) == DraftSizes(target_layers=(0, 3))
    with pytest.raises(ConfigError, match="--width is given with --target-layers"):
        sizes_of("draft", {"target_layers": (0, 3), "width": 64})
    with pytest.raises(ConfigError, match="--target-layers is -1; give at least 0"):
        sizes_of("draft", {"target_layers": layer_numbers("0,-1")})
    with pytest.raises(ConfigError, match="--target-layers is '0, x'; give numbers"):
        layer_numbers("0, x")
