"""Steps in the console's chat that browser tests share."""

PAGES = ["chat", "requests", "engine", "tokens", "models", "settings", "api"]
MARKDOWN = (
    "# Trees\n\nA **banyan** is *wide*, `ficus` to [some](https://example.org/a).\n\n"
    "- one\n- two\n  - inner\n\n1. first\n2. second\n\n> said\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    "```python\nprint('<b>')\n```\n\n"
    "<img src=x onerror=alert(1)> <script>alert(2)</script> [x](javascript:alert(3))"
)
WATCH = "() => { globalThis.hit = () => { globalThis.wasHit = true; }; }"
XSS = "<img src=x onerror=hit()><script>hit()</script>\"'><svg onload=hit()>"


def say(page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def answers(page):
    return page.locator(".message.assistant")


def finished(page) -> None:
    page.locator("form.ask button").filter(has_text="Send").wait_for()


def show(page, text: str) -> None:
    """Render a text as the answer of a model."""
    page.evaluate(
        """async (text) => {
             const { Markdown } = await import("./console/markdown.js");
             const place = document.createElement("div");
             place.className = "text";
             place.id = "shown";
             document.getElementById("shown")?.remove();
             document.querySelector(".talk").append(place);
             const began = performance.now();
             new Markdown(place).show(text);
             place.dataset.took = performance.now() - began;
           }""",
        text,
    )


def faults_of_access(page) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html'][:150]}" for v in found]
