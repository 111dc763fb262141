"""A distillation: data, training, evaluation, report."""

from __future__ import annotations

import dataclasses
import gc
import logging
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.checkpoints.cache import build_folder, discard_folder
from outrider.checkpoints.files import Files
from outrider.checkpoints.resolve import BUNDLED_TARGET, draft_assets, resolve_source
from outrider.errors import ConfigError, OutriderError
from outrider.text.tokenizer import TOKENIZER_FILES, load_tokenizer
from outrider.train.acceptance import measure_acceptance
from outrider.train.data import make_data
from outrider.train.files import read_object, write_json
from outrider.train.progress import ProgressReporter
from outrider.train.report import write_report
from outrider.train.settings import (
    SHARE_OF_GPU,
    DataSettings,
    EvaluationSettings,
    Sizes,
    TrainSettings,
)
from outrider.train.shards import Dataset
from outrider.train.students.base import Student
from outrider.train.students.make import check_fits, layers_read, make_student
from outrider.train.teacher import Teacher
from outrider.train.trainer import STATE, Trainer, agreement
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.checkpoint import load_spec

logger = logging.getLogger(__name__)

PHASES = ("data", "train", "evaluate")
_BESIDE_TOKENIZERS = (
    *("tokenizer_config.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "generation_config.json"),
)
CHECKPOINT, TRAINING, TRAINED = "checkpoint", "training", "trained.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationPlan:
    """All settings of a distillation."""

    kind: str
    target: str
    out: Path
    data_folders: tuple[Path, ...]
    data: DataSettings
    train: TrainSettings
    sizes: Sizes
    evaluation: EvaluationSettings
    device: str = "auto"
    gpu_memory_utilization: float = SHARE_OF_GPU
    begin_from: Path | None = None
    phases: tuple[str, ...] = PHASES
    resume: bool = False


def distill(plan: DistillationPlan, reporter: ProgressReporter) -> dict[str, Any]:
    """Run the plan's phases; returns the report if it evaluates."""
    spec = load_spec(plan.target)
    _check(plan, spec)
    if "data" in plan.phases:
        _make_data(plan, reporter)
    if "train" in plan.phases:
        _free_memory()
        _train(plan, spec, reporter)
    if "evaluate" in plan.phases:
        _free_memory()
        return _evaluate(plan, reporter)
    return {}


def _make_data(plan: DistillationPlan, reporter: ProgressReporter) -> None:
    if len(plan.data_folders) != 1:
        raise ConfigError(
            f"--data names {len(plan.data_folders)} folders, and texts are written into one; run "
            "a command for each (--phase data)."
        )
    share = plan.gpu_memory_utilization
    make_data(plan.data_folders[0], plan.target, plan.data, plan.device, reporter, share)


def _free_memory() -> None:
    """Free the models of the previous phase."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check(plan: DistillationPlan, spec: ModelSpec) -> None:
    """Fail before hours are spent."""
    check_fits(plan.sizes, spec)
    training_device(plan.device)
    context = max(plan.data.context, plan.train.context)
    if context > spec.max_position:
        raise ConfigError(
            f"--context is {context}, and {plan.target!r} goes up to {spec.max_position}; give at "
            "most that."
        )
    if "evaluate" in plan.phases and plan.evaluation.tokens >= plan.data.context:
        raise ConfigError(
            f"--evaluation-tokens is {plan.evaluation.tokens}, which leaves no room for a prompt "
            f"in --context {plan.data.context}; give fewer."
        )
    state = plan.out / TRAINING / STATE
    if "train" in plan.phases and state.exists() and not plan.resume:
        raise ConfigError(
            f"--out is {str(plan.out)!r}, where training has begun; give --resume to continue "
            "it, or another folder."
        )


def _train(plan: DistillationPlan, spec: ModelSpec, reporter: ProgressReporter) -> None:
    data = Dataset(*plan.data_folders)
    device = training_device(plan.device)
    with reporter.task(f"loading {plan.target} as the teacher"):
        teacher = Teacher(plan.target, device, layers_read(plan.sizes, spec))
        student = make_student(plan.sizes, teacher, data, plan.train, plan.target)
        if plan.begin_from is not None:
            student.begin_from(plan.begin_from)
    folder = plan.out / TRAINING
    trainer = Trainer(
        student, teacher, data.records, plan.train, folder, _identity(plan), data.held_out
    )
    if trainer.resume():
        reporter.log(f"training resumes at step {trainer.step} of {plan.train.steps}")
    trainer.run(reporter)
    with reporter.task("measuring agreement"):
        agreement_by_draft = agreement(student, teacher, data.held_out, plan.train)
    write_checkpoint(plan.out / CHECKPOINT, student, plan.target)
    _write_summary(plan, data, student, trainer, agreement_by_draft)


def _identity(plan: DistillationPlan) -> dict[str, Any]:
    """What must not change when training resumes."""
    settings = dataclasses.asdict(plan.train)
    may_change = ("save_every", "log_every", "compile")
    return {
        "kind": plan.kind,
        "target": plan.target,
        "begin_from": None if plan.begin_from is None else str(plan.begin_from),
        **{name: value for name, value in settings.items() if name not in may_change},
        **dataclasses.asdict(plan.sizes),
    }


def _write_summary(
    plan: DistillationPlan,
    data: Dataset,
    student: Student,
    trainer: Trainer,
    agreement_by_draft: dict[str, list[float]],
) -> None:
    """Write what a later report needs of the training."""
    summary = {
        "kind": plan.kind,
        "target": plan.target,
        "is_model": student.is_model,
        "parameters": sum(each.numel() for each in student.parameters()),
        "sizes": dataclasses.asdict(plan.sizes),
        "training": dataclasses.asdict(plan.train),
        "data": {
            "conversations": len(data.records),
            "tokens": data.num_tokens,
            "settings": [manifest.settings for manifest in data.manifests],
        },
        "agreement": agreement_by_draft,
        "history": trainer.history,
    }
    write_json(plan.out / TRAINING / TRAINED, summary)


def write_checkpoint(folder: Path, student: Student, target: str) -> None:
    """Write the checkpoint in its format's usual layout; replaces an earlier one."""

    def build(scratch: Path) -> None:
        student.save(scratch)
        if student.is_model:
            _copy_tokenizer(target, scratch)

    if folder.exists():
        discard_folder(folder)
    build_folder(folder, build)


def _copy_tokenizer(target: str, folder: Path) -> None:
    """Copy the target's files; a tokenizer inside a GGUF is converted."""
    is_bundled = target == BUNDLED_TARGET
    source = draft_assets() if is_bundled else resolve_source(target, needed=Files.TEXT)
    source = source if source.is_dir() else source.parent
    if not any((source / name).is_file() for name in TOKENIZER_FILES):
        load_tokenizer(target).save_pretrained(str(folder))
        return
    for name in (*TOKENIZER_FILES, *_BESIDE_TOKENIZERS):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _evaluate(plan: DistillationPlan, reporter: ProgressReporter) -> dict[str, Any]:
    summary = plan.out / TRAINING / TRAINED
    checkpoint = plan.out / CHECKPOINT
    if not summary.exists() or not checkpoint.is_dir():
        raise ConfigError(
            f"--out is {str(plan.out)!r}, which has no finished training; finish it first "
            "(--phase train --resume)."
        )
    report = read_object(summary, "a record of a training")
    data = Dataset(*plan.data_folders)
    try:
        acceptance = measure_acceptance(
            plan.target,
            checkpoint,
            bool(report["is_model"]),
            data.held_out,
            data.kinds,
            plan.evaluation,
            plan.data.context,
            plan.device,
            reporter,
            plan.gpu_memory_utilization,
        )
    except OutriderError as error:
        # Training is complete and its checkpoint written: report without acceptance.
        logger.warning("acceptance was not measured: %s", error)
        acceptance = {"not_measured": str(error)}
    report["acceptance"] = acceptance
    write_report(plan.out, report)
    return report


def training_device(name: str) -> torch.device:
    """Resolve "auto" to a device of this machine."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device is {name!r} but there is no CUDA device; give cpu.")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device is {name!r}; give auto, cpu, cuda or cuda:N.") from None


def all_phases(chosen: Collection[str]) -> tuple[str, ...]:
    """The chosen phases in their order; all if none is chosen."""
    for name in chosen:
        if name not in PHASES:
            raise ConfigError(f"--phase is {name!r}; choose from {', '.join(PHASES)}.")
    return tuple(name for name in PHASES if not chosen or name in chosen)
