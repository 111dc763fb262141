"""A real browser before the real gateway; only the engine is a fake one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from browser_tools import MISSING, OpenPage, StartService, chromium, scripted_text
from fake_engine import FakeService, fake_service
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

TIMEOUT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of a module, as no other event loop may run in this thread while there is one."""
    found = chromium()
    if found is None:
        pytest.skip(MISSING)
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[StartService]:
    """A server before an engine that always writes the same text."""
    with ExitStack() as stack:

        def start(**options: Any) -> FakeService:
            options = {"script": scripted_text, "step_s": 0.005} | options
            return stack.enter_context(fake_service(tmp_path, **options))

        yield start


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens the page of a server; a message of an error in the console fails the test."""
    wrong: list[str] = []
    with ExitStack() as stack:

        def note(message: ConsoleMessage) -> None:
            # The browser itself notes each answer that is no success; the page shows them.
            if message.type in ("error", "warning") and "Failed to load" not in message.text:
                wrong.append(message.text)

        def open_at(service: FakeService, **options: Any) -> Page:
            context = stack.enter_context(browser.new_context(**options))
            context.set_default_timeout(TIMEOUT_MS)
            page = context.new_page()
            page.on("console", note)
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.goto(f"http://{service.server.http_address}/")
            return page

        yield open_at
    assert wrong == []
