"""Detects the kind of head in a checkpoint by its `config.json`, or else by its tensors.

Recognising an ordinary model imports no torch: processes without models call this too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.catalog.heads import HeadKind
from outrider.checkpoints.files import Files, read_json
from outrider.checkpoints.resolve import resolve_source
from outrider.errors import ModelError
from outrider.workers.heads.spec import HeadSpec

if TYPE_CHECKING:
    from outrider.workers.heads.configs import HeadConfig
    from outrider.workers.models.spec import ModelSpec

_MEDUSA_BLOCK = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.linear\.weight")


def kind_of(
    source: str | Path, *, revision: str | None = None, by_tensors: bool = False
) -> HeadKind | None:
    """The kind of head of a source; None for a model. Decided by `config.json` or, with
    `by_tensors` for a source known to be a head, by tensor names. Raises `ModelError` for an
    unsupported kind."""
    path = resolve_source(source, revision, Files.TEXT)
    config = path / "config.json"
    if not (path.is_dir() and config.is_file()):
        return None
    kind = head_kind(read_json(config))
    if kind is not None or not by_tensors:
        return kind
    from outrider.workers.heads.weights import head_folder, open_weights  # torch

    return head_kind(read_json(config), open_weights(head_folder(source, revision)).names)


def load_head_spec(
    source: str | Path,
    target: ModelSpec,
    *,
    revision: str | None = None,
    needed: Files = Files.ALL,
) -> HeadSpec:
    """Sizes of a head, checked to fit this target, without reading its weights. From a hub these
    are downloaded only if `needed`; without them only `config.json` is used."""
    # Imported here because it needs torch.
    from outrider.workers.heads.weights import head_folder, open_weights

    folder = head_folder(source, revision, needed)
    names = open_weights(folder).names if needed is not Files.TEXT else None
    spec = head_spec(read_json(folder / "config.json"), names, target)
    if spec is None:
        raise not_a_head(source)
    spec.check_fits(target)
    return spec


def head_spec(
    config: Mapping[str, Any], names: Collection[str] | None, target: ModelSpec
) -> HeadSpec | None:
    """Sizes of the head with this configuration and these tensor names; None for an ordinary model.
    The target fills in what old formats omit."""
    found = head_config(config, names, target)
    return None if found is None else found.spec


def head_config(
    config: Mapping[str, Any], names: Collection[str] | None, target: ModelSpec
) -> HeadConfig | None:
    """The whole configuration of a head; see `head_spec`."""
    from outrider.workers.heads.configs import READERS

    kind = head_kind(config, names)
    if kind is None:
        return None
    try:
        return READERS[kind].read(config, names or (), target)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"config.json of this {kind} head has a value of the wrong type ({error}); "
            "get the checkpoint again."
        ) from None


def head_kind(config: Mapping[str, Any], names: Collection[str] | None = None) -> HeadKind | None:
    """The kind of head by configuration, or else by tensor names; None for an ordinary model."""
    kind = _stated_kind(config)
    bare = {name.removeprefix("model.") for name in names or ()}
    if kind in (None, HeadKind.EAGLE3) and "fc.weight" in bare:
        if not {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & bare:
            raise _eagle1()
        return HeadKind.EAGLE3
    if kind is not None:
        return kind
    if any(_MEDUSA_BLOCK.fullmatch(name) for name in bare):
        return HeadKind.MEDUSA
    return HeadKind.MLP if "speculator.proj.0.weight" in bare else None


def _stated_kind(config: Mapping[str, Any]) -> HeadKind | None:
    speculators = config.get("speculators_model_type")
    model_type = config.get("model_type")
    listed = config.get("architectures")
    architectures = "".join(map(str, listed)).lower() if isinstance(listed, list) else ""
    if speculators is not None:
        if speculators == "eagle":
            raise _eagle1()
        if speculators != HeadKind.EAGLE3:
            raise ModelError(
                f"speculators_model_type is {speculators!r}, which is not supported; known is "
                f"{HeadKind.EAGLE3}."
            )
        return HeadKind.EAGLE3
    if model_type == HeadKind.MLP:
        return HeadKind.MLP
    if model_type == HeadKind.MEDUSA or "medusa_num_heads" in config or "medusa" in architectures:
        return HeadKind.MEDUSA
    if "eagle3" in architectures or "draft_vocab_size" in config or model_type == HeadKind.EAGLE3:
        return HeadKind.EAGLE3
    if "eagle" in architectures or model_type == "eagle":
        raise _eagle1()
    return HeadKind.EAGLE3 if "eagle_config" in config else None


def not_a_head(source: str | Path) -> ModelError:
    kinds = ", ".join(HeadKind)
    return ModelError(f"{str(source)!r} holds no head of a known kind ({kinds}); check the path.")


def _eagle1() -> ModelError:
    return ModelError(
        "this is an EAGLE-1 head (EAGLE-2 heads are the same), which is not supported; take an "
        "EAGLE-3 head of the same target."
    )
