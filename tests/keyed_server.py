"""A real engine in this process behind a real gateway with keys."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fake_engine import MODEL, SECRET, fake_tokenizer_source, running_server

from outrider.config import EngineConfig
from outrider.engine.build import build_engine
from outrider.engine.service import EngineService
from outrider.gateway.auth.keys_file import key_digest
from outrider.gateway.frontend import Frontend
from outrider.links.listener import Listener


@contextmanager
def server_with_keys(
    folder: Path, fields: Mapping[str, str], settings: Mapping[str, Any]
) -> Iterator[Frontend]:
    """`fields` are those of each key, as YAML, by its name, which is the key itself as well."""
    keys = folder / "keys.yaml"
    entries = (
        f"  - {{name: {name}, sha256: '{key_digest(name).hex()}'{more}}}\n"
        for name, more in fields.items()
    )
    keys.write_text("keys:\n" + "".join(entries))
    usual = {"target.model": MODEL, "target.max_model_len": 256, "cache.kv_cache_gb": 0.05}
    listener = Listener([f"unix:{folder}/engine.sock"], SECRET, {})
    engine = build_engine(EngineConfig.from_settings(usual | dict(settings)))
    service = EngineService(engine, listener)
    stepping = threading.Thread(target=service.run)
    stepping.start()
    try:
        place: Any = SimpleNamespace(address=listener.addresses[0])
        with (
            mock.patch("outrider.gateway.served_model.load_tokenizer", fake_tokenizer_source),
            running_server(place, api_keys_file=str(keys)) as front,
        ):
            yield front
    finally:
        service.stop()
        stepping.join(60)
        service.close()
        listener.close()
        engine.close()
