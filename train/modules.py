"""The layers of students, named as their checkpoints name them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.train.attention import DraftedKv, attend
from outrider.train.packing import Documents
from outrider.workers.models.rope import rope_tables
from outrider.workers.models.rope_spec import RopeSpec
from outrider.workers.models.spec import ModelSpec

INITIAL_STD = 0.02


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """`input_width` is attention's input: twice the width in an EAGLE-3 head."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    input_width: int

    @classmethod
    def of(cls, target: ModelSpec) -> LayerSizes:
        """The sizes of the target's layers."""
        return cls(
            width=target.hidden_size,
            heads=target.num_heads,
            kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            intermediate=target.intermediate_size,
            eps=target.norm_eps,
            input_width=target.hidden_size,
        )


def linear(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=INITIAL_STD)
    return made


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self._eps)


class Rotary(nn.Module):
    """Rotary embedding of queries and keys; its tables are not in checkpoints."""

    cos: Tensor
    sin: Tensor

    def __init__(self, spec: RopeSpec, head_dim: int, num_positions: int) -> None:
        super().__init__()
        cos, sin = rope_tables(spec, head_dim, num_positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[rows, length, heads, size] at positions [rows, length]."""
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        first, second = x.float().chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return turned.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self._head_dim = sizes.head_dim
        self.q_proj = linear(sizes.input_width, sizes.heads * sizes.head_dim)
        self.k_proj = linear(sizes.input_width, sizes.kv_heads * sizes.head_dim)
        self.v_proj = linear(sizes.input_width, sizes.kv_heads * sizes.head_dim)
        self.o_proj = linear(sizes.heads * sizes.head_dim, sizes.width)

    def qkv(self, x: Tensor, positions: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, [rows, length, heads, size] each."""
        split = (*x.shape[:2], -1, self._head_dim)
        query, key = self.q_proj(x).view(split), self.k_proj(x).view(split)
        return (
            rotary(query, positions),
            rotary(key, positions),
            self.v_proj(x).view(split),
        )

    def attend_and_project(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents,
        drafted: DraftedKv = (),
    ) -> Tensor:
        scale = self._head_dim**-0.5
        mixed = attend(query, key, value, documents, scale=scale, drafted=drafted)
        out: Tensor = self.o_proj(mixed.flatten(2))
        return out


class Mlp(nn.Module):
    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.gate_proj = linear(sizes.width, sizes.intermediate)
        self.up_proj = linear(sizes.width, sizes.intermediate)
        self.down_proj = linear(sizes.intermediate, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


@dataclass(slots=True)
class DraftKv:
    """Keys and values of one layer of an unrolled head: those of the sequence first, then those
    of each draft step."""

    sequence: tuple[Tensor, Tensor] | None = None
    drafted: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a step's keys and values; returns the sequence's."""
        if self.sequence is None:
            self.sequence = key, value
        else:
            self.drafted.append((key, value))
        return self.sequence


class DecoderLayer(nn.Module):
    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.width, sizes.eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RmsNorm(sizes.width, sizes.eps)
        self.mlp = Mlp(sizes)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        rotary: Rotary,
        documents: Documents,
        draft_kv: DraftKv | None = None,
        read: Tensor | None = None,
    ) -> Tensor:
        """Attention reads `read`, or the norm of `x`; its output is added to `x`."""
        read = self.input_layernorm(x) if read is None else read
        query, key, value = self.self_attn.qkv(read, positions, rotary)
        drafted: DraftedKv = ()
        if draft_kv is not None:
            key, value = draft_kv.add(key, value)
            drafted = tuple(draft_kv.drafted)
        x = x + self.self_attn.attend_and_project(query, key, value, documents, drafted)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
