"""Pictures of the console for docs/console.md: `python -m tests.console.pictures ADDRESS FOLDER`,
with a server that runs at ADDRESS. Asks it a few questions, so that there is something to see."""

import json
import shutil
import sys
import threading
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tests.console.conftest import BROWSERS

QUESTION = "Write a Python function that reverses a list, and explain it in two sentences."
FORMULA_QUESTION = "How do I solve a quadratic equation?"
LOAD = 4
ANSWER = r"""The equation $ax^2 + bx + c = 0$ has the solutions

$$x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$

| discriminant | solutions |
|:--|--:|
| $b^2 > 4ac$ | 2 |
| $b^2 = 4ac$ | 1 |

```python
def roots(a: float, b: float, c: float) -> tuple[float, float]:
    d = (b * b - 4 * a * c) ** 0.5  # the discriminant's root
    return (-b + d) / (2 * a), (-b - d) / (2 * a)
```

- [x] real solutions
- [ ] complex ones
"""


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
        _take(browser, address, folder / "ended.png", "engine", "light")
        _take(browser, address, folder / "formulas.png", "chat", "light")


def _take(
    browser: Browser, address: str, file: Path, name: str, scheme: str, width: int = 1100
) -> None:
    size = {"width": width, "height": 680}
    page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    if file.stem == "formulas":  # how an answer looks, whatever the model can write
        event = {"choices": [{"delta": {"content": ANSWER}, "finish_reason": "stop"}]}
        body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        page.route("**/chat/completions", lambda route: route.fulfill(body=body))
    page.goto(f"{address}/#/{name}")
    if name == "chat":
        is_formula = file.stem == "formulas"
        page.get_by_label("Your message").fill(FORMULA_QUESTION if is_formula else QUESTION)
        page.keyboard.press("Enter")
        page.locator("form.ask button").filter(has_text="Send").wait_for()
        page.locator(".talk").evaluate("(talk) => { talk.scrollTop = 0; }")
    if name == "tokens":
        page.get_by_role("button", name="Show tokens").click()
        page.get_by_role("button", name="Show tokens").wait_for()
        page.get_by_role("option").nth(8).hover()
    if file.stem == "ended":
        page.get_by_role("img", name="answer").first.wait_for()
        heading = page.get_by_role("heading", name="Ended requests")
        heading.evaluate("(heading) => heading.scrollIntoView()")
    page.wait_for_timeout({"engine": 25_000}.get(file.stem, 500))
    page.screenshot(path=str(file))
    page.close()
    with Image.open(file) as shot:  # a palette makes the file a third as large
        shot.convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(file, optimize=True)


def _load(address: str, number: int) -> None:
    for turn in range(12):
        prompt = f"Story {number}, part {turn}. " + "Once upon a time there was a tree. " * 30
        body = {"prompt": prompt, "max_tokens": 150, "ignore_eos": True}
        httpx.post(f"{address}/v1/completions", json=body, timeout=120)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
