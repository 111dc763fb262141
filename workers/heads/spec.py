"""The sizes of a head, without its weights. No torch: processes without models import this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.catalog.heads import HeadKind
from outrider.errors import ModelError

if TYPE_CHECKING:
    from outrider.workers.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Sizes of one head.

    A head with `layers` reads the inputs of these target layers (auxiliary hidden states),
    concatenated; one without reads the target's hidden states after its final norm. `num_kv_heads`
    of 0 means no attention and no KV.
    """

    kind: HeadKind
    hidden_size: int  # of the target
    vocab_size: int  # of the target
    layers: tuple[int, ...] = ()
    state_size: int = 0  # per token
    max_depth: int | None = None  # None: unlimited
    num_kv_heads: int = 0
    head_dim: int = 0
    num_own_layers: int = 1  # each with KV, if it keeps any
    num_params: int = 0
    made_for: str = ""  # the target's name, if the checkpoint states it

    @property
    def keeps_kv(self) -> bool:
        return self.num_kv_heads > 0

    @property
    def num_features(self) -> int:
        """Features per token in `Runner.last_pass`."""
        return self.hidden_size * max(len(self.layers), 1)

    def check_fits(self, target: ModelSpec) -> None:
        """Raise `ModelError` if this head was made for another target."""
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
                f"{self._name} reads the input of layer {max(self.layers)} of its target, which "
                f"has {target.num_layers} layers; use the head that was made for this target."
            )

    @property
    def _name(self) -> str:
        origin = f" (made for {self.made_for!r})" if self.made_for else ""
        return f"this {self.kind} head{origin}"
