"""Microseconds per operation of the CPU kernels at SmolLM2-135M's shapes.

    python -m outrider.benchmarks.cpu_kernels [--rows 1,2,4,6] [--threads 2] [--stored Q4_1,Q8_0]

With --stored, weights of these kinds are compared with float32 instead. Linears are timed on copies
of their weights that exceed the caches, as a model's weights do. Each figure is the lower quartile
of single calls; candidates are interleaved, so that other work on the machine affects all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table

from outrider.kernels.ops import Ops, RaggedBatch, select_ops
from outrider.kernels.reference import ReferenceOps
from outrider.kernels.stored import KINDS, Packed
from outrider.kernels.types import Packing

NUM_LAYERS, HIDDEN, MLP, VOCAB = 30, 576, 1536, 49152
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
QKV = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
LINEARS = {  # name: (out, in, how many in the model)
    "qkv": (QKV, HIDDEN, NUM_LAYERS),
    "o": (HIDDEN, HIDDEN, NUM_LAYERS),
    "gate_up": (2 * MLP, HIDDEN, NUM_LAYERS),
    "down": (HIDDEN, MLP, NUM_LAYERS),
    "head": (VOCAB, HIDDEN, 1),
}
COLD_BYTES = 128 << 20  # of weight copies: several times the last-level cache
TURN, WARM_UP = 10, 3
Calls = dict[str, Callable[[int], object]]


def quartiles_us(calls: Calls, num_rounds: int) -> dict[str, float]:
    """Lower quartile of each candidate's time; call i gets i, to pick a cold weight.

    The first calls of a turn are not counted: the previous candidate's threads may still spin on a
    core.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-(-num_rounds // TURN)):
        for name, call in calls.items():
            for i in range(-WARM_UP, TURN):
                start = time.perf_counter()
                call(turn * TURN + i)
                if i >= 0:
                    times[name].append(time.perf_counter() - start)
    return {name: sorted(t)[len(t) // 4] * 1e6 for name, t in times.items()}


def linear_calls(ops: Ops, out_features: int, in_features: int, num_rows: int) -> Calls:
    copies = max(2, COLD_BYTES // (out_features * in_features * 4))
    weights = [torch.randn(out_features, in_features) for _ in range(copies)]
    ours = [ops.linear(w, None) for w in weights]
    onednn = [ReferenceOps(deterministic=True).linear(w, None) for w in weights]
    x = torch.randn(num_rows, in_features)
    return {
        "ours": lambda i: ours[i % copies](x),
        "F.linear": lambda i: F.linear(x, weights[i % copies]),
        "oneDNN packed": lambda i: onednn[i % copies](x),
    }


def stored_calls(
    ops: Ops, packing: Packing, kind: str, shape: tuple[int, int], num_rows: int
) -> Calls:
    """Weights of random bits, all finite. 16-bit ones avoid subnormals, which a CPU multiplies
    slowly."""
    num_values = packing.stored.packed_len(kind, shape)
    copies = max(2, COLD_BYTES // (4 * num_values))
    bits = [torch.randint(1 << 30, (num_values,), dtype=torch.int32) for _ in range(copies)]
    if kind in ("BF16", "F16"):
        bits = [(b & 0x3FFF3FFF) | 0x30003000 for b in bits]
    ours = [packing.stored.linear([Packed(kind, b.view(torch.float32), shape)], None) for b in bits]
    plain_copies = max(2, COLD_BYTES // (4 * shape[0] * shape[1]))
    plain = [ops.linear(torch.randn(shape), None) for _ in range(plain_copies)]
    x = torch.randn(num_rows, shape[1])
    return {
        "stored": lambda i: ours[i % copies](x),
        "float32": lambda i: plain[i % plain_copies](x),
    }


def stored_table(ops: Ops, kinds: Sequence[str], rows: Sequence[int], num_rounds: int) -> Table:
    """Stored against float32; widths are rounded down to whole blocks."""
    packing = ops.packing
    assert packing is not None
    table = Table("linear", "kind", "rows", "stored", "float32", "times", "GB/s", "GFMA/s")
    for name, (out_features, width, _) in LINEARS.items():
        for kind in kinds:
            shape = (out_features, width // KINDS[kind].block_len * KINDS[kind].block_len)
            for num_rows in rows:
                calls = stored_calls(ops, packing, kind, shape, num_rows)
                us = quartiles_us(calls, num_rounds if num_rows < 16 else TURN)
                num_bytes = 4 * packing.stored.packed_len(kind, shape)
                figures = [f"{t:.0f}" for t in us.values()]
                table.add_row(
                    *(name, kind, str(num_rows), *figures),
                    f"{us['float32'] / us['stored']:.2f}",
                    f"{num_bytes / us['stored'] / 1e3:.1f}",
                    f"{shape[0] * shape[1] * num_rows / us['stored'] / 1e3:.1f}",
                )
        table.add_section()
    return table


def decode_batch(num_rows: int, context_len: int) -> RaggedBatch:
    """One sequence whose last `num_rows` tokens are in this pass."""
    num_blocks = -(-context_len // BLOCK_SIZE)
    positions = torch.arange(context_len - num_rows, context_len)
    return RaggedBatch(
        positions=positions,
        slots=positions.clone(),
        cu_query_lens=torch.tensor([0, num_rows], dtype=torch.int32),
        context_lens=torch.tensor([context_len], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        max_query_len=num_rows,
        max_context_len=context_len,
    )


def other_calls(ops: Ops, num_rows: int, context_len: int) -> Calls:
    batch = decode_batch(num_rows, context_len)
    num_blocks = batch.block_tables.shape[1]
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    keys, values = torch.randn(shape), torch.randn(shape)
    angles = torch.rand(context_len, HEAD_DIM // 2)
    cos, sin = angles.cos(), angles.sin()
    x, residual, weight = (torch.randn(n, HIDDEN) for n in (num_rows, num_rows, 1))
    qkv, gate_up = torch.randn(num_rows, QKV), torch.randn(num_rows, 2 * MLP)
    q = torch.randn(num_rows, NUM_HEADS, HEAD_DIM)
    scores, key = torch.randn(num_rows, VOCAB), torch.arange(num_rows)
    sizes = NUM_HEADS, NUM_KV_HEADS, HEAD_DIM
    return {
        "add_rms_norm": lambda _: ops.add_rms_norm(x, residual, weight[0], 1e-5),
        "silu_mul": lambda _: ops.silu_mul(gate_up),
        "rotate_and_store": lambda _: ops.rotate_and_store(
            qkv, cos, sin, batch, keys, values, *sizes
        ),
        f"attention, {context_len} keys": lambda _: ops.attention(q, keys, values, batch, 0.125),
        "gumbel_argmax": lambda _: ops.gumbel_argmax(scores, key, key % 4, key),
    }


def linear_table(ops: Ops, rows: Sequence[int], num_rounds: int) -> Table:
    table = Table("linear", "rows", "ours", "F.linear", "oneDNN packed", "ours GB/s", "GFMA/s")
    passes = {n: dict.fromkeys(("ours", "F.linear", "oneDNN packed"), 0.0) for n in rows}
    for name, (out_features, in_features, count) in LINEARS.items():
        for num_rows in rows:
            calls = linear_calls(ops, out_features, in_features, num_rows)
            us = quartiles_us(calls, num_rounds if num_rows < 16 else TURN)
            rate = out_features * in_features / us["ours"] / 1e3
            figures = [f"{t:.0f}" for t in us.values()]
            table.add_row(
                name, str(num_rows), *figures, f"{4 * rate:.1f}", f"{rate * num_rows:.1f}"
            )
            for candidate, t in us.items():
                passes[num_rows][candidate] += t * count / 1e3
        table.add_section()
    for num_rows, totals in passes.items():
        table.add_row("all, ms", str(num_rows), *(f"{t:.1f}" for t in totals.values()), "", "")
    return table


def other_table(ops: Ops, rows: Sequence[int], context_len: int, num_rounds: int) -> Table:
    table = Table("operation", *(f"{n} rows" for n in rows), title=f"{ops.name} / torch, us")
    cells: dict[str, list[str]] = {}
    for num_rows in rows:
        ours = quartiles_us(other_calls(ops, num_rows, context_len), num_rounds)
        plain = quartiles_us(other_calls(ReferenceOps(), num_rows, context_len), num_rounds // 4)
        for name, us in ours.items():
            cells.setdefault(name, []).append(f"{us:.0f} / {plain[name]:.0f}")
    for name, figures in cells.items():
        table.add_row(name, *figures)
    return table


def main(
    rows: Annotated[str, typer.Option(help="Row counts, comma-separated.")] = "1,2,4,6,8,64",
    threads: Annotated[int, typer.Option(help="Threads; 0 leaves torch's default.")] = 0,
    context: Annotated[int, typer.Option(help="KV length for attention.")] = 512,
    rounds: Annotated[int, typer.Option(help="Timed calls per figure.")] = 60,
    backend: Annotated[str, typer.Option(help="Kernels to time: c or torch.")] = "c",
    stored: Annotated[str, typer.Option(help="Kinds of stored weights, comma-separated.")] = "",
) -> None:
    if threads:
        torch.set_num_threads(threads)
    counts = [int(n) for n in rows.split(",")]
    ops = select_ops(torch.device("cpu"), torch.float32, backend=backend)
    console = Console()
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, us per call")
    if stored:
        console.print(stored_table(ops, stored.split(","), counts, rounds))
        return
    console.print(linear_table(ops, counts, rounds))
    console.print(other_table(ops, counts, context, rounds))


if __name__ == "__main__":
    typer.run(main)
