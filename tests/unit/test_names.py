"""A class name means one thing in the product's tree."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "cluster",
    "gateway",
    "kernels",
    "loadtest",
    "scheduler",
    "train",
    "workers",
    "src/outrider",
)

# Names that stand for the same thing in two places.
SHARED = {
    "Attention": "a layer: for serving in workers/models, with gradients in train",
    "RmsNorm": "a layer: for serving in workers/models, with gradients in train",
}


def _definitions() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_a_class_name_is_defined_once() -> None:
    twice = {name: at for name, at in _definitions().items() if len(at) > 1}
    assert {name: at for name, at in twice.items() if name not in SHARED} == {}


def test_every_exception_is_one() -> None:
    found = _definitions()
    assert [name for name in SHARED if len(found[name]) < 2] == []
