"""The console in a real browser, on scripted answers: pages, keys, keyboard, narrow and dark."""

import json

import msgspec
import pytest

from banyan.base.ids import RequestId
from banyan.messages.events import LiveRequest, Reply
from tests.server.fakes import Site, steps
from tests.support.flags import config_of

PAGES = ["chat", "requests", "engine", "tokens", "models", "settings", "api"]
MARKDOWN = (
    "# Trees\n\nA **banyan** is *wide*, `ficus` to [some](https://example.org/a).\n\n"
    "- one\n- two\n  - inner\n\n1. first\n2. second\n\n> said\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    "```python\nprint('<b>')\n```\n\n"
    "<img src=x onerror=alert(1)> <script>alert(2)</script> [x](javascript:alert(3))"
)


@pytest.fixture
def site(shared_console: Site) -> Site:
    shared_console.generator.script = lambda _: steps("Hel", "lo")
    shared_console.generator.hold_after = None
    shared_console.generator.asked.clear()
    shared_console.client.reply = Reply(1, True, body=b"[]")
    return shared_console


def say(page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def answers(page):
    return page.locator(".message.assistant")


def finished(page) -> None:
    page.locator("form.ask button").filter(has_text="Send").wait_for()


def test_an_answer_streams_in_and_tells_its_speed(site: Site, open_page) -> None:
    page = open_page(site.url)
    say(page, "Hi")
    finished(page)
    answers(page).get_by_text("Hello").wait_for()
    facts = answers(page).locator(".facts").inner_text()
    assert "first token" in facts and "5 tokens" in facts
    (asked,) = site.generator.asked
    assert "Hi" in site.tokenizer.decode(asked.prompt)


def test_a_conversation_goes_on_and_can_be_edited_and_answered_again(site: Site, open_page) -> None:
    page = open_page(site.url)
    for text in ("One", "Two"):
        say(page, text)
        finished(page)
    assert answers(page).count() == 2
    page.get_by_role("button", name="Answer again").click()
    finished(page)
    assert answers(page).count() == 2 and len(site.generator.asked) == 3
    page.get_by_role("button", name="Edit this message").first.click()
    page.locator(".message textarea").fill("Three")
    page.locator(".message").get_by_role("button", name="Send").click()
    finished(page)
    assert answers(page).count() == 1
    asked = site.tokenizer.decode(site.generator.asked[-1].prompt)
    assert "Three" in asked and "One" not in asked and "Two" not in asked


def test_an_answer_can_be_stopped_and_the_server_hears_of_it(site: Site, open_page) -> None:
    site.generator.hold_after = 1
    while site.generator.closed.acquire(blocking=False):
        pass
    page = open_page(site.url)
    say(page, "Hi")
    answers(page).get_by_text("Hel").wait_for()
    page.keyboard.press("Escape")
    finished(page)
    assert "stopped" in answers(page).locator(".facts").inner_text()
    assert site.generator.closed.acquire(timeout=60), "the request went on"


def test_what_has_come_of_an_answer_survives_a_reload(site: Site, open_page) -> None:
    site.generator.hold_after = 1
    page = open_page(site.url)
    say(page, "Hi")
    answers(page).get_by_text("Hel").wait_for()
    page.reload()
    answers(page).get_by_text("Hel").wait_for()
    assert "stopped" in answers(page).locator(".facts").inner_text()


def test_conversations_are_kept_in_the_browser_and_deleted(site: Site, open_page) -> None:
    page = open_page(site.url)
    say(page, "First talk")
    finished(page)
    page.get_by_role("button", name="New conversation").click()
    say(page, "Second talk")
    finished(page)
    page.reload()
    names = page.locator(".talks .pick")
    assert names.all_inner_texts() == ["Second talk", "First talk"]
    names.last.click()
    page.locator(".message.user").get_by_text("First talk").wait_for()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete First talk").click()
    page.locator(".message.user").get_by_text("Second talk").wait_for()
    assert names.all_inner_texts() == ["Second talk"]


def test_settings_of_a_conversation_reach_the_model(site: Site, open_page) -> None:
    page = open_page(site.url)
    page.get_by_text("System prompt and sampling").click()
    page.get_by_label("System prompt", exact=True).fill("Be brief.")
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("Most tokens").fill("7")
    page.get_by_label("Seed").fill("5")
    say(page, "Hi")
    finished(page)
    (asked,) = site.generator.asked
    assert "Be brief." in site.tokenizer.decode(asked.prompt)
    assert asked.sampling.temperature == pytest.approx(0.3)
    assert asked.sampling.max_new_tokens == 7


def test_markdown_becomes_elements_and_never_markup_of_the_model(site: Site, open_page) -> None:
    site.generator.script = lambda _: steps(MARKDOWN[:40], MARKDOWN[40:300], MARKDOWN[300:])
    page = open_page(site.url)
    say(page, "Hi")
    finished(page)
    text = answers(page).locator(".text")
    page.locator(".hljs-string").wait_for()
    for tag in ("h3", "strong", "em", "li li", "ol", "blockquote", "table", "pre code"):
        assert text.locator(tag).count(), tag
    assert text.locator("img, script").count() == 0
    assert "<script>alert(2)</script>" in text.inner_text()
    links = text.locator("a")
    assert links.count() == 1
    assert links.get_attribute("rel") == "noopener noreferrer nofollow"
    assert links.get_attribute("href") == "https://example.org/a"
    assert text.locator("pre code").inner_text() == "print('<b>')"


def test_code_is_copied_as_it_is(site: Site, open_page) -> None:
    site.generator.script = lambda _: steps("```\na < b\n```")
    page = open_page(site.url, permissions=["clipboard-read", "clipboard-write"])
    say(page, "Hi")
    finished(page)
    page.get_by_role("button", name="Copy this code").click()
    page.get_by_text("Copied").first.wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "a < b"


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


def test_tasks_columns_and_lists_look_as_they_were_meant(site: Site, open_page) -> None:
    page = open_page(site.url)
    show(
        page,
        "- [x] done\n- [ ] open\n  1. inner\n\n"
        "| l | r | c |\n|:--|--:|:-:|\n| a | 1 | b |\n\n![a tree](https://example.org/t.png)",
    )
    boxes = page.locator("#shown li.task input")
    assert [box.is_checked() for box in boxes.all()] == [True, False]
    assert all(box.is_disabled() for box in boxes.all())
    style = "(cell) => getComputedStyle(cell)"
    aligned = [cell.evaluate(f"{style}.textAlign") for cell in page.locator("#shown td").all()]
    assert [where.replace("start", "left") for where in aligned] == ["left", "right", "center"]
    picture = page.locator("#shown a")
    assert picture.inner_text() == "a tree"
    assert picture.get_attribute("href") == "https://example.org/t.png"
    show(page, "- one\n  - two\n")
    marks = [mark.evaluate(f"{style}.listStyleType") for mark in page.locator("#shown ul").all()]
    assert marks == ["disc", "circle"]


FORMULAS = [
    ("$E=mc^2$", 1),
    ("so \\(a_1 + b\\) is", 1),
    ("$$\n\\int_0^1 x\\,dx\n$$", 1),
    ("\\[ \\boxed{42} \\]", 1),
    ("- in a list $x$\n  $$y$$", 2),
    ("It is $5 and then $6.", 0),
    ("`$x$` and\n```\n$$y$$\n```", 0),
    ("$$ left open", 0),
    (r"$\href{javascript:alert(1)}{x}$ $\includegraphics{http://x.example/a}$", 2),
]


def test_formulas_are_drawn_and_money_is_not(site: Site, open_page) -> None:
    page = open_page(site.url)
    for source, drawn in FORMULAS:
        show(page, source)
        if drawn:
            page.locator("#shown .katex").nth(drawn - 1).wait_for()
        assert page.locator("#shown .katex").count() == drawn, source
        assert page.locator("#shown :is(a, img)").count() == 0, source
    show(page, "$E=mc^2$ and $\\mathcal{L}$")
    page.evaluate("document.fonts.ready")
    page.wait_for_function(
        "[...document.fonts].filter((f) => f.family == 'KaTeX_Caligraphic'"
        " && f.status == 'loaded').length == 1"
    )


def test_code_has_colours_and_stays_the_text_it_was(site: Site, open_page) -> None:
    page = open_page(site.url)
    code = 'def f(x):\n    return "<img src=x onerror=alert(1)>"  # &lt;'
    show(page, f"```python\n{code}\n```\n\n```nothing\n<b>\n```")
    page.locator("#shown .hljs-keyword").first.wait_for()
    assert page.locator("#shown pre code").first.inner_text() == code
    assert page.locator("#shown pre code").last.inner_text() == "<b>"
    assert page.locator("#shown :is(img, b)").count() == 0


def test_a_text_that_grows_keeps_the_blocks_before(site: Site, open_page) -> None:
    page = open_page(site.url)
    kept = page.evaluate(
        """async () => {
             const { Markdown } = await import("./console/markdown.js");
             const place = document.createElement("div");
             const markdown = new Markdown(place);
             markdown.show("# One\\n\\nTwo");
             const [first, second] = place.children;
             markdown.show("# One\\n\\nTwo and more\\n\\n- three");
             return [first === place.children[0], second === place.children[1],
                     place.children.length];
           }"""
    )
    assert kept == [True, False, 3]


HOSTILE = [
    "[" * 20_000,
    "*a " * 8_000,
    "> " * 8_000,
    "`" * 20_000,
    "|" * 9_000,
    " " * 20_000,
    "$$\n" * 9_000,
    "$x " * 8_000,
    "\\(" * 9_000,
    "\\[x\n" * 9_000,
    "![" * 9_000,
    "- " * 9_000,
    "http://" * 3_000,
]


def test_long_hostile_answers_are_shown_in_time(site: Site, open_page) -> None:
    page = open_page(site.url)
    for text in HOSTILE:
        show(page, text)
        assert float(page.locator("#shown").get_attribute("data-took")) < 3000, text[:10]


def test_an_error_of_the_server_is_shown(site: Site, open_page) -> None:
    page = open_page(site.url, allowed=("400",))
    page.get_by_text("System prompt and sampling").click()
    page.get_by_label("Most tokens").fill("99999999")
    say(page, "Hi")
    page.get_by_role("alert").filter(has_text="tokens").wait_for()


def test_the_key_is_asked_for_and_kept_for_the_tab_alone(open_page) -> None:
    with Site(config_of("--api-key", "sesame").server).serving() as site:
        page = open_page(site.url, allowed=("401",))
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        dialog.get_by_text("The key was not accepted.").wait_for()
        dialog.get_by_label("API key").fill("sesame")
        page.keyboard.press("Enter")
        say(page, "Hi")
        finished(page)
        answers(page).get_by_text("Hello").wait_for()
        assert page.evaluate("JSON.stringify(localStorage)").find("sesame") < 0
        assert page.evaluate("JSON.stringify(sessionStorage)").find("sesame") > 0


def test_requests_are_listed_and_ended(site: Site, open_page) -> None:
    live = LiveRequest(RequestId("abc"), "prefill", 1000, 640, 512, 0, 2.5, 0.04)
    site.client.reply = Reply(1, True, body=msgspec.json.encode([live]))
    site.state.open._live = {RequestId("abc"): b""}
    site.client.aborted.clear()
    page = open_page(f"{site.url}/#/requests")
    row = page.get_by_role("row").filter(has_text="abc")
    row.get_by_text("Reading the prompt").wait_for()
    assert "1,000" in row.inner_text() and "512" in row.inner_text()
    row.get_by_role("button", name="Abort request abc").click()
    page.get_by_text("The request was ended.").wait_for(state="attached")
    assert site.client.aborted == ["abc"]
    site.client.reply = Reply(1, True, body=b"[]")
    site.state.open._live = {}
    page.get_by_text("Nothing runs now.").wait_for()
    assert page.get_by_role("row").count() == 1


def test_the_engine_s_counters_become_plots(site: Site, open_page) -> None:
    page = open_page(f"{site.url}/#/engine")
    plot = page.get_by_role("img", name="Requests: now 2 and 1")
    plot.wait_for()
    assert page.locator(".plot").count() == 6
    assert page.get_by_role("table").get_by_text("2 of 8").count() == 1


def test_tokens_show_their_alternatives_to_pointer_and_keyboard(site: Site, open_page) -> None:
    page = open_page(f"{site.url}/#/tokens")
    page.get_by_role("button", name="Show tokens").click()
    tokens = page.get_by_role("option")
    tokens.nth(4).wait_for()
    tokens.nth(4).hover()
    detail = page.get_by_role("region", name="Alternatives")
    detail.get_by_text("Token 5").wait_for()
    page.get_by_role("listbox").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    detail.get_by_text("Token 2").wait_for()
    assert "77.9 %" in detail.inner_text() and detail.locator("meter").count() == 2


def test_settings_and_their_origins_are_found(site: Site, open_page) -> None:
    page = open_page(f"{site.url}/#/settings")
    page.get_by_label("Find").fill("page-size")
    row = page.get_by_role("row").filter(has_text="--page-size")
    row.first.wait_for()
    assert "16" in row.first.inner_text() and "default" in row.first.inner_text()


def test_a_route_can_be_tried(site: Site, open_page) -> None:
    page = open_page(f"{site.url}/#/api")
    page.get_by_label("Find").fill("post /tokenize")
    page.locator("summary").filter(has_text="/tokenize").locator("visible=true").first.click()
    form = page.locator(".try form").first
    form.get_by_label("Body").fill(json.dumps({"prompt": "ab"}))
    form.get_by_role("button", name="Send POST").click()
    form.get_by_text("200 OK").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_serious_fault_of_access(site: Site, open_page, name, scheme) -> None:
    from axe_playwright_python.sync_playwright import Axe

    site.generator.script = lambda _: steps(MARKDOWN)
    live = LiveRequest(RequestId("abc"), "decode", 10, 12, 8, 2, 2.5, 0.04)
    site.client.reply = Reply(1, True, body=msgspec.json.encode([live]))
    site.state.open._live = {RequestId("abc"): b""}
    page = open_page(f"{site.url}/#/{name}", color_scheme=scheme, bypass_csp=True)
    if name == "chat":
        say(page, "Hi")
        finished(page)
    if name == "tokens":
        page.get_by_role("button", name="Show tokens").click()
        page.get_by_role("option").nth(4).hover()
    page.wait_for_load_state("networkidle") if name in ("models", "settings", "api") else None
    found = Axe().run(page).response["violations"]
    site.state.open._live = {}
    assert [f"{v['id']}: {v['nodes'][0]['html'][:150]}" for v in found] == []


@pytest.mark.parametrize("name", PAGES)
def test_a_narrow_screen_has_no_sideways_scroll(site: Site, open_page, name) -> None:
    page = open_page(f"{site.url}/#/{name}", viewport={"width": 360, "height": 700})
    page.get_by_role("heading", level=1).wait_for(state="attached")
    widths = "[document.documentElement.scrollWidth, document.getElementById('page').scrollWidth]"
    assert max(page.evaluate(widths)) <= 360


def test_everything_is_reached_by_keyboard_alone(site: Site, open_page) -> None:
    page = open_page(f"{site.url}/#/models")
    page.get_by_role("heading", name="Models").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Chat").wait_for(state="attached")
    assert page.title() == "Chat · Banyan"
    for _ in range(20):
        if page.evaluate("document.activeElement.id") == "ask":
            break
        page.keyboard.press("Tab")
    page.keyboard.type("Hi")
    page.keyboard.press("Enter")
    finished(page)
    assert answers(page).count() == 1


def test_the_look_is_chosen_and_kept(site: Site, open_page) -> None:
    page = open_page(site.url, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Look: auto").click()
    page.get_by_role("button", name="Look: light").click()
    dark = page.evaluate(ground)
    assert light != dark
    page.reload()
    assert page.evaluate(ground) == dark


def test_the_first_paint_comes_within_a_second(site: Site, open_page) -> None:
    page = open_page(site.url)
    page.get_by_label("Your message").wait_for()
    paints = page.evaluate("performance.getEntriesByType('paint').map((one) => one.startTime)")
    assert paints and max(paints) < 1000


def test_without_scripts_there_are_the_facts(site: Site, open_page) -> None:
    page = open_page(site.url, java_script_enabled=False)
    facts = page.locator(".plain")
    assert facts.is_visible() and "2 running, 1 waiting" in facts.inner_text()
    assert not page.locator("#app").is_visible()
