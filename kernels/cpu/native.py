"""ctypes bindings of the C library: structures, signatures and error codes of `cpu/*.c`."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_char_p, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any, ClassVar


class CLayer(Structure):
    _fields_: ClassVar = [
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("out_features", c_int64),
        ("in_features", c_int64),
    ]


class CQuantLayer(Structure):
    """`quant_layer` of quant.h."""

    _fields_: ClassVar = [
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int64),
        ("out_features", c_int64),
        ("in_features", c_int64),
        ("out_stride", c_int64),
    ]


class CBatch(Structure):
    _fields_: ClassVar = [
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("cu_query_lens", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("max_blocks", c_int64),
    ]


class CRotation(Structure):
    _fields_: ClassVar = [
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("max_position", c_int64),
        ("num_slots", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("norm_eps", c_float),
    ]


class CAttention(Structure):
    _fields_: ClassVar = [
        ("q", c_void_p),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("out", c_void_p),
        ("num_blocks", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("window", c_int64),
        ("scale", c_float),
    ]


class CSharedEnd(Structure):
    """`shared_end` of ops.h; the kernels count in it."""

    _fields_: ClassVar = [
        ("memory", c_void_p),
        ("processes", c_void_p),
        ("rank", c_int64),
        ("size", c_int64),
        ("buffer_bytes", c_int64),
        ("limit_ns", c_int64),
        ("exchange", c_uint64),
        ("failure", c_int64),
    ]


COUNTER_BYTES = 128  # as in shared.c


class CCall(Structure):
    """One captured operation; `operation` numbers are those of replay.c."""

    _fields_: ClassVar = [
        ("operation", c_int64),
        ("arguments", c_int64 * 7),
        ("eps", c_double),
    ]


class CPass(Structure):
    """`captured_pass` of ops.h."""

    _fields_: ClassVar = [
        ("calls", c_void_p),
        ("batch", c_void_p),
        ("hidden", c_void_p),
        ("result", c_void_p),
        ("num_calls", c_int64),
        ("tokens", c_int64),
    ]


class CDrafter(Structure):
    """`drafter` of whole_passes.c."""

    _fields_: ClassVar = [
        ("table", c_void_p),
        ("logits", c_void_p),
        ("blocks", c_void_p),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("vocab", c_int64),
        ("seed", c_int64),
        ("stream", c_int64),
        ("temperature", c_float),
        ("least_survival", c_float),
    ]


LINEAR, RMS_NORM, ADD_RMS_NORM, SILU_MUL, ROTATE_AND_STORE, ATTENTION, ALL_REDUCE = range(7)
QUANT_LINEAR, FAKE_QUANTIZE = 7, 8

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "set_num_threads": (None, [c_int64]),
    "linear_pack": (None, [c_void_p, c_int64, c_int64, c_void_p]),
    "linear": (None, [c_void_p, c_void_p, c_int64, c_void_p]),
    "quant_path": (c_char_p, [c_int64]),
    "quant_bytes": (c_int64, [c_int64, c_int64, c_int64]),
    "quant_pack": (None, [c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
    "quant_linear": (c_int, [c_void_p, c_void_p, c_int64, c_void_p]),
    "quant_best": (c_int, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "quant_has_first": (c_int, [c_void_p]),
    "quant_rows": (c_int, [c_void_p, c_void_p, c_int64, c_void_p]),
    "rms_norm": (None, [c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p]),
    "add_rms_norm": (
        None,
        [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p, c_void_p],
    ),
    "layer_norm": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p]),
    "silu_mul": (None, [c_void_p, c_int64, c_int64, c_void_p]),
    "fake_quantize": (None, [c_void_p, c_int64, c_int64, c_int64, c_float, c_void_p]),
    "rotate_and_store": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "attention": (c_int, [c_void_p, c_void_p]),
    "all_reduce": (c_int, [c_void_p, c_void_p, c_int64]),
    "all_gather": (c_int, [c_void_p, c_void_p, c_int64, c_void_p]),
    "broadcast": (c_int, [c_void_p, c_void_p, c_int64, c_int64]),
    "gumbel_max": (c_int, [c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 5]),
    "replay": (c_int, [c_void_p, c_int64]),
    "draft": (c_int, [*[c_void_p] * 4, c_int64, c_int64, *[c_void_p] * 3]),
    "score": (c_int, [*[c_void_p] * 5, c_int64, c_int64, *[c_void_p] * 3]),
    "probability_of": (c_int, [c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
}

_FAILURES = {
    1: (MemoryError, "The kernels found no memory for their work area; free some."),
    2: (IndexError, "A position lies outside the rotation table; shorten the sequence."),
    3: (IndexError, "A KV slot lies outside the cache."),
    4: (IndexError, "A block table names a block outside the cache or is too short."),
    5: (RuntimeError, "Another rank of the tensor-parallel group has exited."),
    6: (RuntimeError, "Another rank of the tensor-parallel group timed out."),
    7: (IndexError, "A row lies outside the table it is looked up in."),
}


def check(code: int, operation: str = "") -> None:
    """Raises the error of a kernel's return code; `operation` names the call."""
    if code:
        kind, message = _FAILURES[code]
        raise kind(f"{operation}: {message}" if operation else message)


def bind(library: ctypes.CDLL) -> SimpleNamespace:
    """The library's functions by their names without the prefix."""
    functions = SimpleNamespace()
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"outrider_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(functions, name, function)
    return functions
