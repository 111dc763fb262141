"""Shared by every test: child processes must find the package too (pytest's `pythonpath` does not
reach them), and nothing may ask a model hub for anything."""

import os
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
