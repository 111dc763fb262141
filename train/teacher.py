"""The target as the teacher: hidden states and logits over packed documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.train.attention import attend
from outrider.train.cuda_graphs import CapturedStep
from outrider.train.packing import Documents, PackedBatch, TeacherStates
from outrider.workers.models.spec import ModelSpec
from outrider.workers.weights.checkpoint import load_spec, whole_folder

_ATTENTION = "outrider_documents"
_documents: ContextVar[Documents] = ContextVar("documents")


class Teacher:
    """A target of any supported family, through `transformers`, frozen."""

    def __init__(self, source: str, device: torch.device, layers: Sequence[int] = ()) -> None:
        self.folder: Path = whole_folder(source)
        self.spec: ModelSpec = load_spec(source)
        self.device = device
        self._model = _load(self.folder, device)
        self._divisor = self.spec.logits_divisor
        self._layers = tuple(layers)
        self._stored: dict[int, Tensor] = {}
        _tap(self._model, self._layers, self.spec.num_layers, self._stored)
        self._run: Callable[[PackedBatch], TeacherStates] = self._forward
        if device.type == "cuda":
            self._run = CapturedStep(self._forward, "the teacher's pass", reads_loss_rows=False)

    @property
    def embedding(self) -> Tensor:
        """[vocabulary, width]."""
        weight: Tensor = self._model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        """[vocabulary, width]."""
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight

    def trunk(self, layers: Sequence[int]) -> dict[str, Tensor]:
        """State dict of the embedding, the last norm and some layers, renumbered from 0."""
        base = self._model.base_model
        parts = {f"layers.{new}": base.layers[old] for new, old in enumerate(layers)}
        parts |= {"embed_tokens": base.embed_tokens, "norm": base.norm}
        return {
            f"{part}.{name}": tensor
            for part, module in parts.items()
            for name, tensor in module.state_dict().items()
        }

    @torch.no_grad()
    def states(self, batch: PackedBatch) -> TeacherStates:
        """The next call may overwrite the result."""
        return self._run(batch)

    def _forward(self, batch: PackedBatch, _: TeacherStates | None = None) -> TeacherStates:
        documents = batch.documents
        with _packed(documents):
            output = self._model.base_model(
                input_ids=batch.ids, position_ids=documents.positions, use_cache=False
            )
        hidden = output.last_hidden_state.flatten(0, 1)
        features = None
        if self._layers:
            stored = [self._stored[layer].flatten(0, 1) for layer in self._layers]
            features = torch.cat(stored, -1)
            self._stored.clear()
        return TeacherStates(hidden, features)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary], in the type of the model."""
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        return logits if self._divisor == 1.0 else logits / self._divisor


def _load(folder: Path, device: torch.device) -> Any:
    import transformers
    from transformers import AttentionInterface

    # No mask function is registered under this name, so `transformers` builds none: the documents
    # say what a token attends to, and deriving it from positions would synchronise.
    AttentionInterface.register(_ATTENTION, _attention)
    quiet = transformers.utils.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=_ATTENTION
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else error
        raise ModelError(
            f"{folder} cannot be loaded as a teacher ({reason}); give a complete checkpoint."
        ) from None
    return model.to(device).eval().requires_grad_(False)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Called by `transformers` with [rows, heads, length, size] each."""
    q, k, v = (part.transpose(1, 2) for part in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    mixed = attend(q, k, v, _documents.get(), scale=scale, window=sliding_window or 0)
    return mixed, None


@contextmanager
def _packed(documents: Documents) -> Iterator[None]:
    token = _documents.set(documents)
    try:
        yield
    finally:
        _documents.reset(token)


def _tap(model: Any, tapped: Sequence[int], num_layers: int, stored: dict[int, Tensor]) -> None:
    """Store the residual stream entering some layers; `num_layers` stands for the last output."""
    base = model.base_model
    layers = getattr(base, "layers", None) or base.decoder.layers

    def entering(layer: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            stored[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def leaving(_: Any, __: Any, output: Any) -> None:
        stored[num_layers] = output[0] if isinstance(output, tuple) else output

    for layer in tapped:
        if layer < num_layers:
            layers[layer].register_forward_pre_hook(entering(layer), with_kwargs=True)
        else:
            layers[-1].register_forward_hook(leaving)
