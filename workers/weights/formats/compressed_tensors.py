"""compressed-tensors, as llm-compressor writes it: groups of layers by name, each with a scheme."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from outrider.errors import ModelError
from outrider.workers.weights.formats.patterns import REGULAR, compiled
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
_MAX_GROUPS = 64


@dataclass(frozen=True, slots=True)
class GroupedSchemes:
    """See `LayerSchemes`. As in compressed-tensors, the group with a layer's exact name goes before
    the first regular expression by the alphabet, and that before the one for all; of several with
    the same target the last counts."""

    named: Mapping[str, Scheme]
    patterns: tuple[tuple[re.Pattern[str], Scheme], ...]
    ignored: frozenset[str]
    ignored_patterns: tuple[re.Pattern[str], ...]
    method: str = METHOD

    @property
    def kind(self) -> str:
        schemes = [*self.named.values(), *(scheme for _, scheme in self.patterns)]
        return kind_of(schemes[0])

    def of(self, module: str, is_quantized: bool) -> Scheme | None:
        scheme = None if self._is_ignored(module) else self._scheme_of(module)
        if (scheme is not None) is not is_quantized:
            raise contradiction(module, is_quantized)
        return scheme

    def _is_ignored(self, module: str) -> bool:
        patterns = self.ignored_patterns
        return module in self.ignored or any(pattern.match(module) for pattern in patterns)

    def _scheme_of(self, module: str) -> Scheme | None:
        if module in self.named:
            return self.named[module]
        for pattern, scheme in self.patterns:
            if pattern.match(module):
                return scheme
        return self.named.get(_CLASS)


def read_schemes(config: Section) -> GroupedSchemes:
    config.one_of("quantization_status", ("compressed", "frozen", None))
    sparsity, transform = config.section("sparsity_config"), config.section("transform_config")
    if sparsity is not None and sparsity.values:
        sparsity.one_of("format", ("dense",))
    if transform is not None and transform.values:
        raise ModelError(
            f"{transform.name} asks for more than quantization, which is not supported; take "
            "another checkpoint of this model."
        )
    targets: dict[str, Scheme] = {}
    for group in _groups(config):
        source = group if group.values.get("format") is not None else config
        packed = source.one_of("format", (*_FP8_FORMATS, _PACKED)) == _PACKED
        scheme = (_packed_scheme if packed else _fp8_scheme)(_weights(group), group)
        targets |= dict.fromkeys(group.texts("targets"), scheme)
    if not targets:
        raise ModelError(f"{config.name} names no layers; get the complete checkpoint again.")
    regular = sorted(target for target in targets if target.startswith(REGULAR))
    patterns = compiled(regular, f"{config.name}.config_groups")
    ignored = config.texts("ignore")
    return GroupedSchemes(
        {target: scheme for target, scheme in targets.items() if target not in regular},
        tuple(zip(patterns, (targets[target] for target in regular), strict=True)),
        frozenset(ignored),
        compiled(ignored, f"{config.name}.ignore"),
    )


def _groups(config: Section) -> Iterator[Section]:
    groups = config.section("config_groups")
    if groups is None or not groups.values:
        raise ModelError(f"{config.name} has no config_groups; get the complete checkpoint again.")
    if len(groups.values) > _MAX_GROUPS:
        raise ModelError(
            f"{groups.name} has {len(groups.values)} groups, and may have {_MAX_GROUPS}; take "
            "another checkpoint of this model."
        )
    for name in groups.values:
        group = groups.section(name)
        if group is None:
            raise ModelError(
                f"{groups.name} has an empty group; get the complete checkpoint again."
            )
        output = group.section("output_activations")
        if output is not None:
            raise ModelError(
                f"{output.name} is set, and outputs are not rounded here; take another checkpoint "
                "of this model."
            )
        yield group


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
    inputs.one_of("scale_dtype", (None,))
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
