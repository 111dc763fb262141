"""What is known of a head without its weights. No tensors: a front door asks too."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from outrider.errors import ModelError

if TYPE_CHECKING:
    from outrider.workers.models.spec import ModelSpec


class HeadKind(StrEnum):
    """Also the names under which they are registered, and vLLM's for the same methods."""

    EAGLE3 = "eagle3"
    MEDUSA = "medusa"
    MLP = "mlp_speculator"


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Sizes of one head.

    A head with `layers` reads the residual stream entering these layers of the target, one after
    the other; one without reads the target's hidden states behind its final norm. `num_kv_heads` of
    0 means that it attends to nothing and keeps no KV.
    """

    kind: HeadKind
    hidden_size: int  # of the target
    vocab_size: int  # of the target
    layers: tuple[int, ...] = ()
    state_size: int = 0  # of what it remembers of a token
    max_depth: int | None = None  # None: it goes on for ever
    num_kv_heads: int = 0
    head_dim: int = 0
    num_own_layers: int = 1  # with KV each, where it keeps any
    num_params: int = 0
    made_for: str = ""  # the target's name, where the checkpoint tells

    @property
    def keeps_kv(self) -> bool:
        return self.num_kv_heads > 0

    @property
    def num_features(self) -> int:
        """Of a token, as `Runner.passed` hands them over."""
        return self.hidden_size * max(len(self.layers), 1)

    def check_fits(self, target: ModelSpec) -> None:
        """One sentence if this head was made for another target."""
        for what, own, others in (
            ("hidden size", self.hidden_size, target.hidden_size),
            ("vocabulary", self.vocab_size, target.vocab_size),
        ):
            if own != others:
                raise ModelError(
                    f"{self._name} is for a target with a {what} of {own}, and the target's is "
                    f"{others}; use the head that was made for this target."
                )
        if self.layers and max(self.layers) > target.num_layers:
            raise ModelError(
                f"{self._name} reads what enters layer {max(self.layers)} of its target, which has "
                f"{target.num_layers} layers; use the head that was made for this target."
            )

    @property
    def _name(self) -> str:
        origin = f" (made for {self.made_for!r})" if self.made_for else ""
        return f"this {self.kind} head{origin}"
