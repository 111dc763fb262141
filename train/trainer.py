"""The training phase: steps, and a saved state from which a run resumes exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.train.cuda_graphs import CapturedStep
from outrider.train.files import write_whole
from outrider.train.loss import DistillationMetrics, distillation_loss
from outrider.train.packing import (
    PackedBatch,
    PackedDataLoader,
    TeacherStates,
    make_batch,
    pack_rows,
)
from outrider.train.progress import ProgressReporter
from outrider.train.settings import TrainSettings
from outrider.train.shards import TrainingRecord
from outrider.train.students.base import Student
from outrider.train.teacher import Teacher
from outrider.train.teacher_cache import TeacherCache

STATE = "state.pt"
MIN_LR_SCALE = 0.05  # at the end of the cosine


class Trainer:
    """Teacher, student, optimiser and position in the data. A saved state with another `identity`
    is refused. Held-out KL is measured at every save: it rises when the student overfits."""

    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        records: Sequence[TrainingRecord],
        settings: TrainSettings,
        folder: Path,
        identity: dict[str, Any],
        held_out: Sequence[TrainingRecord] = (),
    ) -> None:
        self.student, self.teacher, self.settings = student, teacher, settings
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self._folder, self._identity, self._held_out = folder, identity, held_out
        num_rows = max(settings.batch_tokens // settings.context, 1)
        weight = settings.prompt_weight
        self._batches = PackedDataLoader(records, settings.context, num_rows, weight, settings.seed)
        self._teacher_states = TeacherCache(teacher.states, len(records), self._batches.num_tokens)
        self._optimiser = _optimiser(student, settings, teacher.device)
        self._draft_outputs: Any = (
            torch.compile(student.draft_outputs) if settings.compile else student.draft_outputs
        )
        self._run_step: Callable[[PackedBatch, TeacherStates], DistillationMetrics] = (
            self._train_step
        )
        if teacher.device.type == "cuda" and not settings.compile:
            self._run_step = CapturedStep(
                self._train_step, "the training step", reads_loss_rows=True
            )

    def resume(self) -> bool:
        """Load the saved state; False if there is none."""
        path = self._folder / STATE
        if not path.exists():
            return False
        try:
            state = torch.load(path, map_location=self.teacher.device, weights_only=True)
        except Exception as error:  # a damaged file may raise anything
            raise ConfigError(
                f"{path} cannot be read ({type(error).__name__}); begin again with another --out."
            ) from None
        for name, value in self._identity.items():
            if state["identity"].get(name) != value:
                raise ConfigError(
                    f"{path} was begun with {name} {state['identity'].get(name)!r}, and now it is "
                    f"{value!r}; give the same, or another --out."
                )
        self.student.load_state_dict(state["student"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.step, self.history = int(state["step"]), list(state["history"])
        self._batches.epoch, self._batches.index = state["position"]
        torch.set_rng_state(state["rng"].cpu())
        if self.teacher.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"].cpu(), self.teacher.device)
        return True

    def save(self) -> None:
        device = self.teacher.device
        state = {
            "identity": self._identity,
            "student": self.student.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
            "history": self.history,
            "position": (self._batches.epoch, self._batches.index),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        }
        write_whole(self._folder / STATE, lambda file: torch.save(state, file))

    def run(self, reporter: ProgressReporter) -> None:
        """Train to the last step, saving every `save_every` steps and at the end."""
        settings = self.settings
        measured: DistillationMetrics | None = None
        suffix = ""
        self.student.train()
        with reporter.bar("training", settings.steps) as bar:
            while self.step < settings.steps:
                metrics = self._next_step()
                measured = metrics if measured is None else _sum(measured, metrics)
                self.step += 1
                is_last = self.step == settings.steps
                if self.step % settings.log_every == 0 or is_last:
                    bar.update(self.step, self._log(measured) + suffix)
                    measured = None
                if self.step % settings.save_every == 0 or is_last:
                    suffix = self._measure_held_out()
                    self.save()

    def _measure_held_out(self) -> str:
        metrics = agreement(
            self.student,
            self.teacher,
            self._held_out,
            self.settings,
            teacher_logits=self._teacher_logits,
        )
        self.student.train()
        if not metrics:
            return ""
        self.history.append({"step": self.step, "held_out": metrics["kl"]})
        return ", held out " + " ".join(f"{value:.3f}" for value in metrics["kl"])

    def _next_step(self) -> DistillationMetrics:
        self._set_rate(self.settings.learning_rate * lr_scale(self.step, self.settings))
        batch = self._batches.next_batch().to(self.teacher.device)
        return self._run_step(batch, self._teacher_states(batch)).copy()

    def _train_step(
        self, batch: PackedBatch, teacher_states: TeacherStates | None
    ) -> DistillationMetrics:
        """One optimiser step. Nothing here synchronises, so that it can be captured."""
        assert teacher_states is not None
        with autocast(self.teacher.device):
            draft_outputs = self._draft_outputs(batch, teacher_states)
        chunk_rows = self.settings.chunk_rows
        loss, measured = distillation_loss(
            self._teacher_logits,
            teacher_states.hidden,
            batch,
            draft_outputs,
            chunk_rows=chunk_rows,
            with_metrics=False,
        )
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.student.parameters(), self.settings.clip)
        self._optimiser.step()
        return measured

    def _set_rate(self, rate: float) -> None:
        """On a GPU the rate is a tensor, which captured steps read."""
        device = self.teacher.device
        for group in self._optimiser.param_groups:
            if device.type != "cuda":
                group["lr"] = rate
                continue
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.zeros((), device=device)
            group["lr"].fill_(rate)

    def _teacher_logits(self, hidden: Tensor) -> Tensor:
        logits = self.teacher.logits(hidden)
        temperature = self.settings.teacher_temperature
        return logits if temperature == 1.0 else logits.div_(temperature)

    def _log(self, measured: DistillationMetrics) -> str:
        kl = measured.means()["kl"]
        if not all(map(math.isfinite, kl)):
            raise ConfigError(
                f"the loss is not finite at step {self.step}; begin again with a lower "
                f"--learning-rate than {self.settings.learning_rate:g} and another --out."
            )
        self.history.append({"step": self.step, "kl": kl})
        return "KL " + " ".join(f"{value:.3f}" for value in kl)


def autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def lr_scale(step: int, settings: TrainSettings) -> float:
    """The factor on the learning rate: a warm-up, then a cosine."""
    warmup = min(settings.warmup, settings.steps // 10)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(settings.steps - warmup, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return MIN_LR_SCALE + (1 - MIN_LR_SCALE) * cosine


@torch.no_grad()
def agreement(
    student: Student,
    teacher: Teacher,
    records: Sequence[TrainingRecord],
    settings: TrainSettings,
    *,
    teacher_logits: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, list[float]]:
    """KL, agreement and overlap of each draft token on `records` (see `DistillationMetrics`).
    `teacher_logits` replaces the teacher's own distribution."""
    student.eval()
    total: DistillationMetrics | None = None
    for rows in _rows_of(records, settings):
        batch = make_batch(rows, settings.context, 0.0).to(teacher.device)
        if not len(batch.loss_indices):
            continue
        teacher_states = teacher.states(batch)
        with autocast(teacher.device):
            draft_outputs = student.draft_outputs(batch, teacher_states)
        chunk_rows = settings.chunk_rows
        _, metrics = distillation_loss(
            teacher_logits or teacher.logits,
            teacher_states.hidden,
            batch,
            draft_outputs,
            chunk_rows=chunk_rows,
        )
        total = metrics if total is None else _sum(total, metrics)
    return {} if total is None else total.means()


def _rows_of(
    records: Sequence[TrainingRecord], settings: TrainSettings
) -> Iterator[list[list[TrainingRecord]]]:
    packed = pack_rows([len(record.ids) for record in records], settings.context)
    at_once = max(settings.batch_tokens // settings.context, 1)
    for first in range(0, len(packed), at_once):
        yield [[records[i] for i in row] for row in packed[first : first + at_once]]


def _sum(total: DistillationMetrics, metrics: DistillationMetrics) -> DistillationMetrics:
    total.add(metrics)
    return total


def _optimiser(
    student: nn.Module, settings: TrainSettings, device: torch.device
) -> torch.optim.Optimizer:
    """Norms and biases do not decay."""
    matrices = [each for each in student.parameters() if each.ndim > 1]
    vectors = [each for each in student.parameters() if each.ndim == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
        capturable=device.type == "cuda",
    )
