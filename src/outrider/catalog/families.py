"""The model families that can be served, as `model_type` of config.json names them."""

from __future__ import annotations

from typing import Final

FAMILIES: Final = ("granite", "llama", "mistral", "opt", "qwen2", "qwen3")
