"""Builds a student of each kind."""

from __future__ import annotations

import dataclasses

import torch

from outrider.errors import ConfigError
from outrider.train.settings import DraftSizes, Eagle3Sizes, MedusaSizes, Sizes, TrainSettings
from outrider.train.shards import Dataset
from outrider.train.students.base import Student
from outrider.train.students.draft import DraftStudent
from outrider.train.students.eagle3 import Eagle3Student, chosen_layers
from outrider.train.students.medusa import MedusaStudent
from outrider.train.students.mlp import MlpStudent
from outrider.train.teacher import Teacher
from outrider.workers.models.rope_spec import RopeSpec
from outrider.workers.models.spec import ModelSpec

# These may differ from a default llama; a draft has the default of every other field.
_MAY_DIFFER = (
    *("family", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position", "norm_eps", "eos_ids"),
)


def layers_read(sizes: Sizes, target: ModelSpec) -> tuple[int, ...]:
    """The target layers a student reads, before the teacher is loaded."""
    return chosen_layers(target.num_layers) if isinstance(sizes, Eagle3Sizes) else ()


def check_fits(sizes: Sizes, target: ModelSpec) -> None:
    """Raise if no student of this kind can be trained on this target."""
    if isinstance(sizes, DraftSizes):
        _check_layers(sizes.target_layers, target)
        return
    if target.embed_size != target.hidden_size:
        raise ConfigError(
            f"the target's embeddings have {target.embed_size} channels and its layers "
            f"{target.hidden_size}, which no head can read; train a draft."
        )
    is_plain = target.embedding_multiplier == target.logits_divisor == 1.0
    if not is_plain and isinstance(sizes, Eagle3Sizes):
        raise ConfigError(
            f"the target is a {target.family} model with scaled embeddings, which EAGLE-3 heads "
            "do not support; train a draft."
        )


def _check_layers(numbers: tuple[int, ...], target: ModelSpec) -> None:
    """A draft has the layers of a plain llama and tied embeddings."""
    if not numbers:
        return
    if max(numbers) >= target.num_layers:
        raise ConfigError(
            f"--target-layers has {max(numbers)}, and the target's layers are 0 to "
            f"{target.num_layers - 1}; name some of them."
        )
    plain = ModelSpec(
        **{field: getattr(target, field) for field in _MAY_DIFFER},
        windows=(0,) * target.num_layers,
        embed_size=target.hidden_size,
        attention_scale=target.head_dim**-0.5,
        rope=RopeSpec(theta=target.rope.theta) if target.rope else RopeSpec(),
        tied=True,
    )
    differing = [
        field.name
        for field in dataclasses.fields(ModelSpec)
        if getattr(plain, field.name) != getattr(target, field.name)
    ]
    if differing:
        raise ConfigError(
            f"--target-layers takes layers of a plain llama whose embedding is its head, and this "
            f"{target.family} model differs in {differing[0]}; give the draft's sizes instead."
        )


def make_student(
    sizes: Sizes, teacher: Teacher, data: Dataset, train: TrainSettings, target: str
) -> Student:
    """A student with initial weights that follow from the seed."""
    torch.manual_seed(train.seed)
    student: Student
    if isinstance(sizes, DraftSizes):
        student = DraftStudent(sizes, teacher, train.context)
    elif isinstance(sizes, Eagle3Sizes):
        student = Eagle3Student(sizes, teacher, train.context, data.answer_counts())
    elif isinstance(sizes, MedusaSizes):
        student = MedusaStudent(sizes, teacher, target)
    else:
        student = MlpStudent(sizes, teacher)
    return student.to(teacher.device)
