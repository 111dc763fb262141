"""What the tests in a browser share: a text that the fake engine writes, and asking for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache

from fake_engine import FakeService, tokenizer
from playwright.sync_api import Page, expect

TEXT = (
    "A rainbow forms when sunlight enters a drop of rain, bends, splits into its colours, is "
    "reflected at the back of the drop, and bends once more on its way out. "
)
MISSING = "no Chromium is installed; 'apt-get install -y chromium' as root installs one."
StartService = Callable[..., FakeService]
OpenPage = Callable[..., Page]

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Where the browser is; OUTRIDER_CHROMIUM names one elsewhere."""
    named = os.environ.get("OUTRIDER_CHROMIUM")
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


@cache
def text_ids() -> list[int]:
    return list(tokenizer().encode(TEXT, add_special_tokens=False))


def scripted_text(seed: int, position: int) -> int:
    return text_ids()[position % len(text_ids())]


def ask(page: Page, prompt: str = "How do rainbows form?") -> None:
    """Type a prompt, send it and wait for the end of its answer."""
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_be_enabled()
