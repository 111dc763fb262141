"""The phase that trains: steps, and a state from which they go on as if nothing had happened."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.train.files import write_whole
from outrider.train.loss import Measured, distillation_loss
from outrider.train.packing import Batch, Batches, Seen, batch_of, pack
from outrider.train.recorded import Recorded
from outrider.train.remembered import RememberedPasses
from outrider.train.settings import TrainSettings
from outrider.train.shards import Record
from outrider.train.students.base import Student
from outrider.train.teacher import Teacher
from outrider.train.telling import Teller

STATE = "state.pt"
LEAST_SHARE_OF_RATE = 0.05  # what the cosine ends at


class Trainer:
    """Teacher, student, optimiser and where in the data they are. `identity` says what is trained;
    a state of something else is refused. On texts `held_out` it is measured whenever it saves: when
    these grow harder while the others grow easier, texts are learned by heart."""

    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        records: Sequence[Record],
        settings: TrainSettings,
        folder: Path,
        identity: dict[str, Any],
        held_out: Sequence[Record] = (),
    ) -> None:
        self.student, self.teacher, self.settings = student, teacher, settings
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self._folder, self._identity, self._held_out = folder, identity, held_out
        num_rows = max(settings.batch_tokens // settings.context, 1)
        weight = settings.prompt_weight
        self._batches = Batches(records, settings.context, num_rows, weight, settings.seed)
        self._see = RememberedPasses(teacher.see, len(records), self._batches.num_tokens)
        self._optimiser = _optimiser(student, settings, teacher.device)
        self._guesses: Any = torch.compile(student.guesses) if settings.compile else student.guesses
        self._learn_from: Callable[[Batch, Seen], Measured] = self._learn
        if teacher.device.type == "cuda" and not settings.compile:
            self._learn_from = Recorded(self._learn, "a step of the training", reads_rows=True)

    def resume(self) -> bool:
        """Take up a saved state; False if there is none."""
        path = self._folder / STATE
        if not path.exists():
            return False
        try:
            state = torch.load(path, map_location=self.teacher.device, weights_only=True)
        except Exception as error:  # whatever a damaged file makes the reader stumble over
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

    def run(self, teller: Teller) -> None:
        """To the last step, saving on the way and at the end."""
        settings = self.settings
        measured: Measured | None = None
        told = ""
        self.student.train()
        with teller.bar("training", settings.steps) as bar:
            while self.step < settings.steps:
                found = self._one_step()
                measured = found if measured is None else _sum(measured, found)
                self.step += 1
                is_last = self.step == settings.steps
                if self.step % settings.log_every == 0 or is_last:
                    bar.at(self.step, self._log(measured) + told)
                    measured = None
                if self.step % settings.save_every == 0 or is_last:
                    told = self._measure_held_out()
                    self.save()

    def _measure_held_out(self) -> str:
        found = agreement(
            self.student, self.teacher, self._held_out, self.settings, teach=self._teach
        )
        self.student.train()
        if not found:
            return ""
        self.history.append({"step": self.step, "held_out": found["kl"]})
        return ", held out " + " ".join(f"{value:.3f}" for value in found["kl"])

    def _one_step(self) -> Measured:
        self._set_rate(self.settings.learning_rate * rate_share(self.step, self.settings))
        batch = self._batches.take().to(self.teacher.device)
        return self._learn_from(batch, self._see(batch)).copy()

    def _learn(self, batch: Batch, seen: Seen | None) -> Measured:
        """From one batch. Nothing here waits for the device, so that it can be recorded."""
        assert seen is not None
        with autocast(self.teacher.device):
            guesses = self._guesses(batch, seen)
        chunk_rows = self.settings.chunk_rows
        loss, measured = distillation_loss(
            self._teach, seen.hidden, batch, guesses, chunk_rows=chunk_rows, measures=False
        )
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.student.parameters(), self.settings.clip)
        self._optimiser.step()
        return measured

    def _set_rate(self, rate: float) -> None:
        """On a GPU it is a tensor, which recorded steps read."""
        device = self.teacher.device
        for group in self._optimiser.param_groups:
            if device.type != "cuda":
                group["lr"] = rate
                continue
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.zeros((), device=device)
            group["lr"].fill_(rate)

    def _teach(self, hidden: Tensor) -> Tensor:
        logits = self.teacher.logits(hidden)
        temperature = self.settings.teacher_temperature
        return logits if temperature == 1.0 else logits.div_(temperature)

    def _log(self, measured: Measured) -> str:
        kl = measured.means()["kl"]
        if not all(map(math.isfinite, kl)):
            raise ConfigError(
                f"the loss is no number at step {self.step}; begin again with a lower "
                f"--learning-rate than {self.settings.learning_rate:g} and another --out."
            )
        self.history.append({"step": self.step, "kl": kl})
        return "KL " + " ".join(f"{value:.3f}" for value in kl)


def autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def rate_share(step: int, settings: TrainSettings) -> float:
    """Of the learning rate: a warm-up, then a cosine."""
    warmup = min(settings.warmup, settings.steps // 10)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(settings.steps - warmup, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return LEAST_SHARE_OF_RATE + (1 - LEAST_SHARE_OF_RATE) * cosine


@torch.no_grad()
def agreement(
    student: Student,
    teacher: Teacher,
    records: Sequence[Record],
    settings: TrainSettings,
    *,
    teach: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, list[float]]:
    """On texts that are given: KL, agreement and overlap, level by level (see `Measured`), from the
    teacher's own distribution or the one that `teach` makes of its states."""
    student.eval()
    total: Measured | None = None
    for rows in _rows_of(records, settings):
        batch = batch_of(rows, settings.context, 0.0).to(teacher.device)
        if not len(batch.rows):
            continue
        seen = teacher.see(batch)
        with autocast(teacher.device):
            guesses = student.guesses(batch, seen)
        chunk_rows = settings.chunk_rows
        _, found = distillation_loss(
            teach or teacher.logits, seen.hidden, batch, guesses, chunk_rows=chunk_rows
        )
        total = found if total is None else _sum(total, found)
    return {} if total is None else total.means()


def _rows_of(records: Sequence[Record], settings: TrainSettings) -> Iterator[list[list[Record]]]:
    packed = pack([len(record.ids) for record in records], settings.context)
    at_once = max(settings.batch_tokens // settings.context, 1)
    for first in range(0, len(packed), at_once):
        yield [[records[i] for i in row] for row in packed[first : first + at_once]]


def _sum(total: Measured, found: Measured) -> Measured:
    total.add(found)
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
