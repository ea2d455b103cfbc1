"""Pictures of the console for docs/console.md: `python -m tests.console.pictures ADDRESS FOLDER`,
with a server that runs at ADDRESS. Asks it a few questions, so that there is something to see."""

import shutil
import sys
import threading
from pathlib import Path

import httpx
from playwright.sync_api import Browser, sync_playwright

from tests.console.conftest import BROWSERS

QUESTION = "Write a Python function that reverses a list, and explain it in two sentences."
LOAD = 4


def main(address: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        _take(browser, address, folder / "chat.png", "chat", "light")
        _take(browser, address, folder / "narrow.png", "chat", "dark", width=400)
        _take(browser, address, folder / "tokens.png", "tokens", "light")
        threads = [threading.Thread(target=_load, args=(address, i)) for i in range(LOAD)]
        for thread in threads:
            thread.start()

        _take(browser, address, folder / "engine.png", "engine", "dark")
        for thread in threads:
            thread.join()


def _take(
    browser: Browser, address: str, file: Path, name: str, scheme: str, width: int = 1100
) -> None:
    size = {"width": width, "height": 680}
    page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    page.goto(f"{address}/#/{name}")
    if name == "chat":
        page.get_by_label("Your message").fill(QUESTION)
        page.keyboard.press("Enter")
        page.locator("form.ask button").filter(has_text="Send").wait_for()
        page.locator(".talk").evaluate("(talk) => { talk.scrollTop = 0; }")
    if name == "tokens":
        page.get_by_role("button", name="Show tokens").click()
        page.get_by_role("button", name="Show tokens").wait_for()
        page.get_by_role("option").nth(8).hover()
    page.wait_for_timeout({"engine": 25_000}.get(name, 200))
    page.screenshot(path=str(file))
    page.close()


def _load(address: str, number: int) -> None:
    for turn in range(12):
        prompt = f"Story {number}, part {turn}. " + "Once upon a time there was a tree. " * 30
        body = {"prompt": prompt, "max_tokens": 150, "ignore_eos": True}
        httpx.post(f"{address}/v1/completions", json=body, timeout=120)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
