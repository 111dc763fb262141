"""compressed-tensors, as llm-compressor writes it: groups of layers by name, each with a scheme."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.errors import ModelError
from outrider.workers.weights.formats.schemes import (
    Fp8Scheme,
    Inputs,
    IntScheme,
    Scheme,
    WordLayout,
    contradiction,
    kind_of,
)
from outrider.workers.weights.formats.section import Section

METHOD = "compressed-tensors"

_FP8_FORMATS = ("float-quantized", "naive-quantized")  # the second, older, is stored alike
_PACKED = "pack-quantized"
_BITS = (4, 8)
_CLASS = "Linear"  # a target that means all linear layers
_REGULAR = "re:"


@dataclass(frozen=True, slots=True)
class _Names:
    """Layers as `targets` and `ignore` name them: exactly, by regular expressions, or all."""

    exact: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, section: Section, key: str) -> _Names:
        texts = section.texts(key)
        try:
            patterns = [re.compile(t.removeprefix(_REGULAR)) for t in texts if t[:3] == _REGULAR]
        except (re.error, RecursionError, OverflowError) as error:
            raise ModelError(
                f"{section.name}.{key} holds a regular expression that is none ({error}); get the "
                "complete checkpoint again."
            ) from None
        return cls(frozenset(t for t in texts if t[:3] != _REGULAR), tuple(patterns))

    def include(self, module: str) -> bool:
        return module in self.exact or any(pattern.match(module) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class GroupedSchemes:
    """See `LayerSchemes`. The group that names a layer goes before one that names them all."""

    groups: tuple[tuple[_Names, Scheme], ...]
    ignored: _Names
    method: str = METHOD

    @property
    def kind(self) -> str:
        return kind_of(self.groups[0][1])

    @property
    def gpu_bytes(self) -> int:
        return max(scheme.gpu_bytes for _, scheme in self.groups)

    def of(self, module: str, is_quantized: bool) -> Scheme | None:
        scheme = None if self.ignored.include(module) else self._named(module)
        if (scheme is not None) is not is_quantized:
            raise contradiction(module, is_quantized)
        return scheme

    def _named(self, module: str) -> Scheme | None:
        for names, scheme in self.groups:
            if names.include(module):
                return scheme
        return next((scheme for names, scheme in self.groups if _CLASS in names.exact), None)


def read_schemes(config: Section) -> GroupedSchemes:
    config.one_of("quantization_status", ("compressed", None))
    for key in ("sparsity_config", "transform_config"):
        section = config.section(key)
        if section is not None and section.values and section.values.get("format") != "dense":
            raise ModelError(
                f"{section.name} asks for more than quantization, which is not supported; take "
                "another checkpoint of this model."
            )
    groups = config.section("config_groups")
    if groups is None or not groups.values:
        raise ModelError(f"{config.name} has no config_groups; get the complete checkpoint again.")
    found: list[tuple[_Names, Scheme]] = []
    for name in groups.values:
        group = groups.section(name)
        if group is not None:
            source = group if group.values.get("format") is not None else config
            packed = source.one_of("format", (*_FP8_FORMATS, _PACKED)) == _PACKED
            read = _packed_scheme if packed else _fp8_scheme
            found.append((_Names.of(group, "targets"), read(_weights(group), group)))
    return GroupedSchemes(tuple(found), _Names.of(config, "ignore"))


def _weights(group: Section) -> Section:
    weights = group.section("weights")
    if weights is None:
        raise ModelError(f"{group.name} has no weights; get the complete checkpoint again.")
    return weights


def _packed_scheme(weights: Section, group: Section) -> IntScheme:
    weights.one_of("type", ("int",))
    bits = weights.one_of("num_bits", _BITS)
    is_symmetric = weights.one_of("symmetric", (True, False), True)
    strategy = weights.one_of("strategy", ("group", "channel"))
    length = weights.size("group_size") if strategy == "group" else 0
    if group.section("input_activations") is not None:
        raise ModelError(
            f"{group.name}.input_activations is set, and inputs of packed weights are not rounded "
            "here; take a checkpoint of weights alone (W4A16, W8A16)."
        )
    return IntScheme(WordLayout.COMPRESSED, bits, length, is_symmetric)


def _fp8_scheme(weights: Section, group: Section) -> Fp8Scheme:
    _check_fp8(weights)
    strategy = weights.one_of("strategy", ("tensor", "channel", "block"))
    blocks = weights.sizes("block_structure") if strategy == "block" else None
    inputs = group.section("input_activations")
    if inputs is None:
        return Fp8Scheme(Inputs.WHOLE, blocks=blocks)
    _check_fp8(inputs)
    if inputs.one_of("dynamic", (True, False), False):
        how = inputs.one_of("strategy", ("token", "group"))
        length = inputs.size("group_size") if how == "group" else 0
        return Fp8Scheme(Inputs.DYNAMIC, blocks=blocks, group_len=length)
    inputs.one_of("strategy", ("tensor",))
    return Fp8Scheme(Inputs.STATIC, blocks=blocks)


def _check_fp8(numbers: Section) -> None:
    numbers.one_of("type", ("float",))
    numbers.one_of("num_bits", (8,))
    numbers.one_of("symmetric", (True,), True)
