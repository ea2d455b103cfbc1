"""A headless browser of this machine, and a served application for it to open.

`make test-console` installs what drives the browser, and then its absence is a failure.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator

import pytest

from banyan.messages.events import Reply
from tests.server.fakes import Site, steps

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _lacking() -> str:
    """Why these tests cannot run here; "" when they can."""
    if not any(map(shutil.which, BROWSERS)):
        return "no Chromium is installed (Debian and Ubuntu: apt install chromium)"
    if not all(map(importlib.util.find_spec, ("playwright", "axe_playwright_python"))):
        return "what drives a browser is not installed: make test-console does it"
    return ""


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """Not for longer than a file: what drives it keeps an event loop in this thread."""
    if lacking := _lacking():
        assert not os.environ.get("NEEDS_BROWSER"), lacking
        pytest.skip(lacking)
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        running = driver.chromium.launch(executable_path=path, args=arguments)
        yield running
        running.close()


@pytest.fixture(scope="module")
def shared_console(browser: object) -> Iterator[Site]:
    with Site().serving() as served:
        yield served


@pytest.fixture
def open_page(browser):
    """`open_page(url, ...)` opens a page of its own that may ask its own server alone; what goes
    wrong in it, and what its policy had to stop, fails the test."""
    contexts, troubles = [], []

    def open_(url: str, allowed: tuple[str, ...] = (), **options):
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}} | options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda said: troubles.append(said.text) if said.type == "error" else 0)
        page.on("request", lambda asked: _check(asked.url, url, troubles))
        page.allowed = allowed
        page.goto(url)
        return page

    yield open_
    known = [word for context in contexts for page in context.pages for word in page.allowed]
    found = [text for text in troubles if not any(word in text for word in known)]
    for context in contexts:
        context.close()
    assert not found


def _check(asked: str, url: str, troubles: list[str]) -> None:
    if not asked.startswith(url.partition("#")[0]):
        troubles.append(f"asked outside: {asked}")


@pytest.fixture
def site(shared_console: Site) -> Site:
    """The shared console, as it is without requests: every answer is "Hello"."""
    shared_console.generator.script = lambda _: steps("Hel", "lo")
    shared_console.generator.hold_after = None
    shared_console.generator.asked.clear()
    shared_console.client.reply = Reply(1, True, body=b"[]")
    return shared_console
