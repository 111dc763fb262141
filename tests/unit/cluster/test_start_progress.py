"""Signs of life while a server starts."""

from __future__ import annotations

import re
import threading
import time

from outrider.cluster.events import Event, EventKind
from outrider.cluster.serve_callbacks import Addresses, ServeCallbacks
from outrider.cluster.start_progress import StartProgress
from outrider.config import EngineConfig
from outrider.progress_stages import stage

ADDRESSES = Addresses("127.0.0.1:1", "127.0.0.1:2")


def test_silence_is_broken_until_the_server_is_ready() -> None:
    told: list[str] = []
    heard = threading.Event()

    def say(event: Event) -> None:
        told.append(event.text)
        if event.text.startswith("still starting"):
            heard.set()

    progress = StartProgress(ServeCallbacks(say, lambda *_: told.append("ready")), quiet_s=0.05)
    progress.callbacks.say(Event(EventKind.STAGE, "models checked"))
    with progress:
        assert heard.wait(60)
        progress.callbacks.on_ready(ADDRESSES, None, EngineConfig())
        progress._thread.join(60)
        assert not progress._thread.is_alive()
    assert told[0] == "models checked"
    assert re.fullmatch(r"still starting, \d+ s since: models checked", told[1])
    assert told[-1] == "ready"


def test_news_are_signs_of_life_themselves() -> None:
    told: list[str] = []
    callbacks = ServeCallbacks(lambda event: told.append(event.text), lambda *_: None)
    with StartProgress(callbacks, quiet_s=30.0) as progress:
        for _ in range(20):
            progress.callbacks.say(Event(EventKind.STAGE, "news"))
            time.sleep(0.001)
    assert set(told) == {"news"}


def test_what_takes_long_is_said_until_the_server_is_ready() -> None:
    told: list[str] = []
    heard = threading.Event()

    def say(event: Event) -> None:
        told.append(event.text)
        heard.set()

    with StartProgress(ServeCallbacks(say, lambda *_: None), soon_s=0.02) as progress:
        with stage("compiling CPU kernels (3 of 21)"):
            assert heard.wait(60)
        progress.callbacks.on_ready(ADDRESSES, None, EngineConfig())
        with stage("of no concern any more"):
            time.sleep(0.2)
    assert told == ["compiling CPU kernels (3 of 21)"]
