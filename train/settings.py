"""Settings of a distillation, checked on construction."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from outrider.errors import ConfigError
from outrider.scheduler.params import MAX_FIXED_DEPTH

# Leaves room for the phases that follow, in case a closed engine has not freed everything.
SHARE_OF_GPU = 0.5


def _at_least(minimum: float, **values: float) -> None:
    for name, value in values.items():
        if value < minimum:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is {value}; give at least {minimum:g}.")


def _share(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is {value}; give a share from 0 to 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The texts the target writes. `prompts` and `documents` are paths."""

    conversations: int = 20_000
    held_out: int = 96
    shard_size: int = 1024
    context: int = 2048
    user_tokens: int = 192
    answer_tokens: int = 384
    prompts: tuple[str, ...] = ()
    documents: str | None = None
    prompt_share: float = 0.25
    document_share: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(1, conversations=self.conversations, shard_size=self.shard_size)
        _at_least(0, held_out=self.held_out, seed=self.seed)
        _at_least(1, user_tokens=self.user_tokens, answer_tokens=self.answer_tokens)
        _at_least(16, context=self.context)
        _share(prompt_share=self.prompt_share, document_share=self.document_share)
        if self.prompt_share + self.document_share > 1:
            raise ConfigError(
                f"--prompt-share and --document-share are {self.prompt_share:g} and "
                f"{self.document_share:g}, together above 1; lower one of them."
            )

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "prompts": list(self.prompts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How a student is trained. `prompt_weight` is the loss weight of a prompt token; the target's
    tokens have 1. `teacher_temperature` scales the teacher's logits."""

    steps: int = 7000
    batch_tokens: int = 32_768
    context: int = 2048
    learning_rate: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.01
    clip: float = 1.0
    prompt_weight: float = 0.1
    teacher_temperature: float = 1.0
    chunk_rows: int = 2048
    save_every: int = 500
    log_every: int = 20
    seed: int = 0
    compile: bool = False

    def __post_init__(self) -> None:
        _at_least(1, steps=self.steps, save_every=self.save_every, log_every=self.log_every)
        _at_least(0, warmup=self.warmup, weight_decay=self.weight_decay, seed=self.seed)
        _at_least(16, context=self.context, chunk_rows=self.chunk_rows)
        _share(prompt_weight=self.prompt_weight)
        if not 0.05 <= self.teacher_temperature <= 4:
            raise ConfigError(
                f"--teacher-temperature is {self.teacher_temperature:g}; give one from 0.05 to 4."
            )
        if self.learning_rate <= 0 or self.clip <= 0:
            raise ConfigError(
                f"--learning-rate is {self.learning_rate:g} and --clip {self.clip:g}; both must "
                "be above 0."
            )
        if self.batch_tokens < self.context:
            raise ConfigError(
                f"--batch-tokens is {self.batch_tokens}, below --context {self.context}; raise "
                "the first or lower the second."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSizes:
    """With `target_layers` the draft starts as these layers of the target, in the target's
    sizes."""

    layers: int = 4
    width: int = 192
    heads: int = 3
    intermediate: int = 640
    target_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        _at_least(0, target_layers=min(sizes.pop("target_layers"), default=0))
        _at_least(1, **sizes)
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(
                f"--width is {self.width} and --heads {self.heads}; every head needs the same even "
                "number of channels, so choose a multiple of twice the heads."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Sizes:
    """Most heads have one layer. `unroll` is the number of draft steps in training; each step's
    loss weight is `decay` times the previous one's. `intermediate` of 0 is the target's."""

    draft_vocab: int = 16_384
    layers: int = 1
    intermediate: int = 0
    unroll: int = 5
    decay: float = 0.8

    def __post_init__(self) -> None:
        _at_least(1, draft_vocab=self.draft_vocab, layers=self.layers, unroll=self.unroll)
        _at_least(0, intermediate=self.intermediate)
        _share(decay=self.decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSizes:
    heads: int = 4
    layers: int = 1
    decay: float = 0.8

    def __post_init__(self) -> None:
        _at_least(1, heads=self.heads, layers=self.layers)
        _share(decay=self.decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSizes:
    """`inner` of 0 is the target's hidden size."""

    predict: int = 4
    inner: int = 0
    tied: bool = True
    scale_input: bool = True
    decay: float = 0.8

    def __post_init__(self) -> None:
        _at_least(1, predict=self.predict)
        _at_least(0, inner=self.inner)
        _share(decay=self.decay)


Sizes = DraftSizes | Eagle3Sizes | MedusaSizes | MlpSizes
SIZES: dict[str, type[Sizes]] = {
    "draft": DraftSizes,
    "eagle3": Eagle3Sizes,
    "medusa": MedusaSizes,
    "mlp": MlpSizes,
}
# Heads start at the target's weights, or have few of their own.
LEARNING_RATES = {"draft": 2e-3, "eagle3": 1e-3, "medusa": 5e-4, "mlp": 1e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """`lengths` are the upper ends of the reported groups of prompt lengths."""

    depth: int = 5
    tokens: int = 128
    temperature: float = 1.0
    lengths: tuple[int, ...] = (256, 1024, 2048)

    def __post_init__(self) -> None:
        _at_least(1, depth=self.depth, evaluation_tokens=self.tokens)
        if self.depth > MAX_FIXED_DEPTH:
            raise ConfigError(f"--depth is {self.depth}; give at most {MAX_FIXED_DEPTH}.")
        if self.temperature <= 0:
            raise ConfigError(
                f"--temperature is {self.temperature:g}; give one above 0, as greedy texts are "
                "measured anyway."
            )
