"""The console in a real browser, on scripted answers: pages, keys, keyboard, narrow and dark."""

import json
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from banyan.base.ids import RequestId
from banyan.engine_client.metrics_observer import RequestOutcome
from banyan.engine_client.request_log import EndedRequests
from banyan.lora.adapter_files import AdapterPlace
from banyan.messages.events import LiveRequest, Reply
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.generation import Usage
from banyan.requests.lora_names import AdapterNames
from banyan.requests.request_spec import spec_of
from tests.server.fakes import Eyes, Site, steps
from tests.support.flags import config_of
from tests.support.pictures import data_url, png

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


def test_an_answer_survives_a_reload_and_goes_on_where_it_ended(site: Site, open_page) -> None:
    site.generator.hold_after = 1
    page = open_page(site.url)
    say(page, "Hi")
    answers(page).get_by_text("Hel").wait_for()
    page.reload()
    answers(page).get_by_text("Hel").wait_for()
    assert "interrupted" in answers(page).locator(".facts").inner_text()
    site.generator.hold_after = None
    site.generator.script = lambda _: steps("lo", " again")
    page.get_by_role("button", name="Continue this answer").click()
    answers(page).get_by_text("Hello again").wait_for()
    finished(page)
    asked = site.tokenizer.decode(site.generator.asked[-1].prompt)
    assert asked.endswith("Hel")
    page.reload()
    answers(page).get_by_text("Hello again").wait_for()
    assert "interrupted" not in answers(page).locator(".facts").inner_text()


def test_an_answer_goes_on_while_another_conversation_is_shown(site: Site, open_page) -> None:
    site.generator.hold_after = 1
    page = open_page(site.url)
    say(page, "First")
    answers(page).get_by_text("Hel").wait_for()
    page.get_by_role("button", name="New conversation").click()
    site.generator.hold_after = None
    say(page, "Second")
    finished(page)
    page.locator(".talks .pick").get_by_text("First").click()
    answers(page).get_by_text("Hel").wait_for()
    page.locator("form.ask button").filter(has_text="Stop").click()
    finished(page)


def test_conversations_are_kept_in_the_browser_and_deleted(site: Site, open_page) -> None:
    page = open_page(site.url)
    say(page, "First talk")
    finished(page)
    page.get_by_role("button", name="New conversation").click()
    say(page, "Second talk")
    finished(page)
    page.reload()
    names = page.locator(".talks .pick")
    names.nth(1).wait_for()
    assert names.all_inner_texts() == ["Second talk", "First talk"]
    names.last.click()
    page.locator(".message.user").get_by_text("First talk").wait_for()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete First talk").click()
    page.locator(".message.user").get_by_text("Second talk").wait_for()
    assert names.all_inner_texts() == ["Second talk"]


def test_settings_of_a_conversation_reach_the_model(site: Site, open_page) -> None:
    page = open_page(site.url)
    page.get_by_text("Model, system prompt and sampling").click()
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


WATCH = "() => { globalThis.hit = () => { globalThis.wasHit = true; }; }"
XSS = "<img src=x onerror=hit()><script>hit()</script>\"'><svg onload=hit()>"


MARKUP = [
    "<img src=x onerror=hit()>",
    "<details open ontoggle=hit()>x</details>",
    "<math><mtext><table><mglyph><style><img src=x onerror=hit()></style></mglyph></table></math>",
    "<svg><animate onbegin=hit() attributeName=x></svg>",
    "<form><button formaction=javascript:hit()>x</button></form>",
    "<a href='jav&#x09;ascript:hit()'>x</a>",
    "[x](JaVaScRiPt:hit())",
    "[x](&#106;avascript:hit())",
    "[x](\\x01javascript:hit())",
    "[x](vbscript:hit()) [x](data:text/html;base64,PHNjcmlwdD4=) [x](//x.example/a)",
    '<javascript:hit()> <https://x.example/"onmouseover=hit()>',
    "[x]: javascript:hit()\n[x] [y][x]",
    "![x](data:image/svg+xml;base64,PHN2Zz4=) ![x](https://x.example/p.png 'on\"error=hit()')",
    "[x](https://x.example 'a\" onmouseover=\"hit()')",
    '```js" onclick=hit() x="\n<script>hit()</script>\n```',
    "```html\n<script>hit()</script><img src=x onerror=hit()>\n```",
    "`<img src=x onerror=hit()>`",
    '$\\htmlClass{x\\" onclick=\\"hit()}{y}$ $\\url{javascript:hit()}$',
    "$\\def\\x{\\x\\x}\\x$ $\\rule{9999em}{9999em}$ ${<script>hit()</script>}$",
    "$\\text{<img src=x onerror=hit()>}$ $\\unknown{<b onclick=hit()>}$",
    '| <img src=x onerror=hit()> | a |\n|:-:" onclick=hit()|--|\n| 1 | 2 |',
    "- [x] <input onfocus=hit() autofocus>\n- [ ](javascript:hit())",
    "<meta http-equiv=refresh content=0;url=https://x.example> <base href=//x.example>",
    "<link rel=stylesheet href=//x.example/a.css> <object data=//x.example>",
    "<embed src=//x.example>",
    "x<!--><img src=x onerror=hit()>--> <![CDATA[><img src=x onerror=hit()>]]> <?xml?><x:script/>",
]

FOUND = """
    () => [...document.querySelectorAll("#shown, #shown *")].flatMap((element) => [
      ["script", "iframe", "img", "object", "embed", "link", "meta", "base", "form", "style"]
        .includes(element.localName) && element.localName,
      ...[...element.attributes].map(({ name, value }) => (name.startsWith("on")
        || (["href", "src", "action", "formaction"].includes(name)
          && !/^(https?:|mailto:)/.test(value)))
        && `${name}=${value}`),
    ]).filter(Boolean)
"""


def test_no_markup_of_an_answer_gets_through(site: Site, open_page) -> None:
    page = open_page(site.url)
    page.evaluate(WATCH)
    for text in MARKUP:
        show(page, text)
        page.evaluate("new Promise((done) => setTimeout(done, 20))")
        assert page.evaluate(FOUND) == [], text
    show(page, "\n\n".join(MARKUP))
    page.locator("#shown .katex").first.wait_for()
    assert page.evaluate(FOUND) == []
    assert page.evaluate("globalThis.wasHit") is None


def test_long_hostile_answers_are_shown_in_time(site: Site, open_page) -> None:
    page = open_page(site.url)
    for text in HOSTILE:
        show(page, text)
        assert float(page.locator("#shown").get_attribute("data-took")) < 10_000, text[:10]


def test_an_edited_question_and_a_second_answer_are_branches(site: Site, open_page) -> None:
    page = open_page(site.url)
    say(page, "One")
    finished(page)
    site.generator.script = lambda _: steps("second")
    page.get_by_role("button", name="Answer again").click()
    answers(page).get_by_text("second").wait_for()
    finished(page)
    assert "2 of 2" in answers(page).locator(".versions").inner_text()
    answers(page).get_by_role("button", name="Version before").click()
    answers(page).get_by_text("Hello").wait_for()
    page.get_by_role("button", name="Edit this message").click()
    page.locator(".message textarea").fill("Other")
    page.locator(".message").get_by_role("button", name="Send").click()
    finished(page)
    question = page.locator(".message.user")
    assert "2 of 2" in question.locator(".versions").inner_text()
    question.get_by_role("button", name="Version before").click()
    question.get_by_text("One").wait_for()
    assert "2 of 2" in answers(page).locator(".versions").inner_text()
    page.reload()
    question.get_by_text("One").wait_for()
    question.get_by_role("button", name="Next version").click()
    question.get_by_text("Other").wait_for()


def test_conversations_are_renamed_and_found_by_what_was_said(site: Site, open_page) -> None:
    page = open_page(site.url)
    for text in ("About oaks", "About elms"):
        page.get_by_role("button", name="New conversation").click()
        say(page, text)
        finished(page)
    page.get_by_role("button", name="Rename About elms").click()
    page.get_by_label("Name of the conversation").fill("Trees")
    page.keyboard.press("Enter")
    names = page.locator(".talks .pick")
    names.get_by_text("Trees").wait_for()
    page.keyboard.press("Control+k")
    page.keyboard.type("elms")
    names.get_by_text("About oaks").wait_for(state="detached")
    assert names.all_inner_texts() == ["Trees"]
    page.get_by_label("Search conversations").fill("ash")
    page.get_by_text("Nothing found.").wait_for()
    page.get_by_label("Search conversations").fill("")
    names.nth(1).wait_for()
    page.reload()
    names.nth(1).wait_for()
    assert names.all_inner_texts() == ["Trees", "About oaks"]


def test_conversations_leave_as_a_file_and_come_back(site: Site, open_page, tmp_path) -> None:
    page = open_page(site.url)
    say(page, "Keep this")
    finished(page)
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Export all conversations").click()
    file = tmp_path / "all.json"
    waiting.value.save_as(file)
    assert json.loads(file.read_text())["format"] == "banyan.conversations"
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Keep this").click()
    page.get_by_text("What would you like to know?").wait_for()
    page.locator("aside input[type=file]").set_input_files(file)
    page.locator(".message.user").get_by_text("Keep this").wait_for()
    answers(page).get_by_text("Hello").wait_for()
    page.locator("aside input[type=file]").set_input_files(file)
    page.locator(".talks .pick").nth(1).wait_for()


def test_a_file_from_elsewhere_brings_no_scripts_and_broken_ones_are_refused(
    site: Site, open_page, tmp_path
) -> None:
    page = open_page(site.url)
    page.evaluate(WATCH)
    upload = page.locator("aside input[type=file]")
    for text, words in (("{", "is not JSON"), ("[]", "no conversations of this console")):
        (tmp_path / "bad.json").write_text(text)
        upload.set_input_files(tmp_path / "bad.json")
        page.get_by_role("alert").get_by_text(words).wait_for()
    messages = [
        {
            **{"id": "a", "parent": None, "role": "user", "content": XSS},
            "pictures": [{"name": XSS, "url": "javascript:hit()"}, {"name": 1, "url": {}}],
        },
        {
            **{"id": "b", "parent": "a", "role": "assistant", "content": XSS, "model": XSS},
            **{"reasoning": XSS, "seen": {"reason": XSS, "tokens": 1}},
            "calls": [{"id": XSS, "name": XSS, "arguments": XSS}, None],
        },
        {"id": "b", "parent": "b", "role": "system", "content": 7},
        None,
    ]
    found = {"id": "x", "title": XSS, "isNamed": True, "settings": {"model": XSS, "system": 1}}
    whole = {"format": "banyan.conversations", "version": 1}
    file = tmp_path / "<b>.json"
    file.write_text(json.dumps({**whole, "conversations": [{**found, "messages": messages}, None]}))
    upload.set_input_files(file)
    page.locator(".talks .pick").nth(1).wait_for()
    page.locator(".talks .pick").filter(has_text="onerror").click()
    page.get_by_text("Model, system prompt and sampling").click()
    page.locator(".message").first.wait_for()
    assert (
        page.locator(".thread :is(script, img[onerror], svg[onload], img[src*=javascript])").count()
        == 0
    )
    assert page.evaluate("globalThis.wasHit") is None


def test_hostile_answers_and_names_run_nothing(site: Site, open_page) -> None:
    page = open_page(site.url)
    page.evaluate(WATCH)
    name = '{"name": "%s", "arguments": {"a": "%s"}}' % (("<img src=x onerror=hit()>",) * 2)
    model = {"id": XSS, "parent": None, "root": XSS, "max_model_len": 1}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [model, model]}))
    delta = {
        "content": f"{XSS}\n\n[a](javascript:hit()) <a href='javascript:hit()'>b</a> "
        "[c](data:text/html,<script>hit()</script>) ![d](javascript:hit()) "
        "$\\href{javascript:hit()}{e}$ $\\htmlData{x=y}{z}$\n\n"
        "```<img/src=x/onerror=hit()>\nx\n```\n\n"
        "| <svg/onload=hit()> |\n|---|\n| [x]: javascript:hit() |\n\n"
        "<iframe srcdoc='<script>hit()</script>'>",
        "reasoning_content": XSS,
        "tool_calls": [{"index": 0, "id": XSS, "function": {"name": XSS, "arguments": name}}],
    }
    event = {"model": XSS, "choices": [{"delta": delta, "finish_reason": "stop"}]}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            body=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n",
            content_type="text/event-stream",
        ),
    )
    say(page, XSS)
    finished(page)
    answers(page).locator("table").wait_for()
    page.reload()
    answers(page).locator("table").wait_for()
    page.evaluate(WATCH)
    page.get_by_text("Model, system prompt and sampling").click()
    for place in PAGES:
        page.evaluate(f"location.hash = '#/{place}'")
        page.get_by_role("heading", level=1).wait_for(state="attached")
    page.evaluate("location.hash = '#/chat'")
    links = answers(page).locator("a")
    links.first.wait_for() if links.count() else None
    assert all(link.get_attribute("href").startswith("http") for link in links.all())
    assert answers(page).locator("script, iframe, img, [onerror], [onload]").count() == 0
    assert page.evaluate("globalThis.wasHit") is None


def test_a_model_or_adapter_and_a_preset_are_chosen(site: Site, open_page) -> None:
    site.state.adapters = AdapterNames(True, [AdapterPlace("pirate", "/nowhere/pirate")])
    page = open_page(site.url)
    page.get_by_text("Model, system prompt and sampling").click()
    page.get_by_label("Model or adapter").select_option("pirate (adapter)")
    page.get_by_label("Preset").select_option("Precise")
    assert page.get_by_label("Temperature").input_value() == "0.2"
    with page.expect_request("**/v1/chat/completions") as waiting:
        say(page, "Hi")
    finished(page)
    asked = waiting.value.post_data_json
    assert asked["model"] == "pirate" and asked["temperature"] == 0.2
    answers(page).get_by_role("heading", name="pirate").wait_for()
    page.get_by_label("System prompt", exact=True).fill("Be brief.")
    page.get_by_label("System prompt", exact=True).blur()
    page.on("dialog", lambda dialog: dialog.accept("Mine"))
    page.get_by_role("button", name="Save as preset").click()
    page.reload()
    page.get_by_text("Model, system prompt and sampling").click()
    assert page.get_by_label("Preset").input_value() == "Mine"
    page.get_by_role("button", name="Delete preset").click()
    assert page.get_by_label("Preset").input_value() == ""
    site.state.adapters = AdapterNames()


def test_a_suggestion_begins_a_conversation(site: Site, open_page) -> None:
    page = open_page(site.url)
    page.get_by_role("button", name="Explain").click()
    answers(page).get_by_text("Hello").wait_for()
    finished(page)
    assert "photosynthesis" in site.tokenizer.decode(site.generator.asked[-1].prompt)


def test_pictures_are_refused_in_words_where_the_model_sees_none(site: Site, open_page) -> None:
    page = open_page(site.url)
    file = {"name": "tree.png", "mimeType": "image/png", "buffer": png(60, 40)}
    page.locator("form.ask input[type=file]").set_input_files(file)
    page.get_by_role("alert").get_by_text("tiny reads text only").wait_for()
    assert page.locator("form.ask img").count() == 0


PASTE = """
    async ([url, kind, name]) => {
      const blob = await (await fetch(url)).blob();
      const data = new DataTransfer();
      data.items.add(new File([blob], name, { type: blob.type }));
      const target = document.getElementById("ask");
      const more = { bubbles: true, cancelable: true };
      target.dispatchEvent(kind === "paste"
        ? new ClipboardEvent("paste", { clipboardData: data, ...more })
        : new DragEvent("drop", { dataTransfer: data, ...more }));
    }
"""


def test_pictures_are_picked_pasted_and_dropped_and_reach_the_model(open_page) -> None:
    site = Site()
    eyes = Eyes(site)
    with site.serving():
        page = open_page(site.url, bypass_csp=True)  # the test's own fetch of a data URL
        chosen = page.locator("form.ask .pictures img")
        file = {"name": XSS, "mimeType": "image/png", "buffer": png(60, 40)}
        page.locator("form.ask input[type=file]").set_input_files(file)
        chosen.first.wait_for()
        page.evaluate(PASTE, [data_url(png(20, 20)), "paste", "pasted.png"])
        chosen.nth(1).wait_for()
        page.evaluate(PASTE, [data_url(png(3000, 20)), "drop", "wide.png"])
        chosen.nth(2).wait_for()
        page.get_by_role("button", name="Remove pasted.png").click()
        with page.expect_request("**/v1/chat/completions") as waiting:
            say(page, "What is this?")
        finished(page)
        assert len(site.generator.asked[-1].message.spans) == 2
        (message,) = waiting.value.post_data_json["messages"]
        first, second, text = message["content"]
        assert first["image_url"]["url"] == data_url(png(60, 40))
        assert second["image_url"]["url"].startswith("data:image/jpeg;base64,")
        assert text == {"type": "text", "text": "What is this?"}
        page.reload()
        shown = page.locator(".message.user .pictures img")
        shown.nth(1).wait_for()
        assert [one.evaluate("(img) => img.naturalWidth") for one in shown.all()] == [60, 2048]
        text = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"x"}
        page.locator("form.ask input[type=file]").set_input_files(text)
        page.get_by_role("alert").get_by_text("no picture of a known kind").wait_for()
        broken = {"name": "broken.png", "mimeType": "image/png", "buffer": b"x"}
        page.locator("form.ask input[type=file]").set_input_files(broken)
        page.get_by_role("alert").get_by_text("cannot be read").wait_for()
    eyes.media.close()


def test_an_error_of_the_server_is_shown(site: Site, open_page) -> None:
    page = open_page(site.url, allowed=("400",))
    page.get_by_text("Model, system prompt and sampling").click()
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


def test_the_plots_show_an_hour_that_the_server_has_kept(site: Site, open_page) -> None:
    for number in range(3):
        site.client.stats = structs.replace(site.client.stats, output_tokens=1000 * number)
        site.state.history.sample(site.client.replicas(), 10.0 * number)
    page = open_page(f"{site.url}/#/engine")
    page.get_by_label("Time").select_option("1 hour")
    page.get_by_role("img", name="Output tokens per second: now 100").wait_for()


def test_ended_requests_have_a_timeline_and_percentiles(site: Site, open_page) -> None:
    site.state.ended = EndedRequests()
    page = open_page(f"{site.url}/#/engine")
    page.get_by_text("None yet.").wait_for()
    for number in range(1, 101):
        spec = spec_of(RequestId(f"r{number}"), [1] * 8, SamplingParams(max_new_tokens=4))
        spec = replace(spec, route=XSS) if number == 100 else spec
        usage = Usage(8, 11, cached_tokens=4, queue_s=0.5)
        outcome = RequestOutcome(spec, usage, "stop", 1.0 + number, first_s=1.0)
        site.state.ended.ended(outcome)
    page.get_by_text("The latest 100, of which 100 are complete.").wait_for()
    rows = page.get_by_role("region", name="Percentiles").get_by_role("row")
    cells = [row.get_by_role("cell").all_inner_texts() for row in rows.all()[1:]]
    assert cells[1] == ["1.0 s"] * 4
    assert cells[2] == ["5.0 s", "9.0 s", "9.5 s", "9.9 s"]
    row = page.get_by_role("row").filter(has_text="r100")
    row.get_by_role("img", name="waiting 500 ms, prompt 500 ms, answer 1 min").wait_for()
    assert "50.0 %" in row.inner_text() and XSS in row.inner_text()


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
    if name == "engine":
        spec = spec_of(RequestId("r"), [1] * 8, SamplingParams(max_new_tokens=4))
        site.state.ended.ended(RequestOutcome(spec, Usage(8, 11), "stop", 2.0, first_s=1.0))
        page.get_by_role("img", name="answer").first.wait_for()
    page.wait_for_load_state("networkidle") if name in ("models", "settings", "api") else None
    found = faults_of_access(page)
    site.state.open._live = {}
    assert found == []


def faults_of_access(page) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html'][:150]}" for v in found]


@pytest.mark.parametrize("width", [1200, 390])
def test_no_state_of_the_chat_has_a_serious_fault_of_access(open_page, width: int) -> None:
    site = Site()
    eyes = Eyes(site)
    with site.serving():
        page = open_page(site.url, bypass_csp=True, viewport={"width": width, "height": 800})
        page.get_by_text("What would you like to know?").wait_for()
        assert faults_of_access(page) == []
        site.generator.script = lambda _: steps("- [x] $a^2$\n- [ ] `b`")
        page.locator("form.ask input[type=file]").set_input_files(
            {"name": "a.png", "mimeType": "image/png", "buffer": png(60, 40)}
        )
        page.locator("form.ask img").wait_for()
        page.get_by_text("Model, system prompt and sampling").click()
        assert faults_of_access(page) == []
        say(page, "Hi")
        finished(page)
        page.get_by_role("button", name="Answer again").click()
        answers(page).locator(".versions").wait_for()
        finished(page)
        answers(page).locator(".katex").wait_for()
        page.get_by_text("Model, system prompt and sampling").click()
        if width < 800:
            page.get_by_role("button", name="Menu").click()
            page.get_by_role("button", name="Conversations", exact=True).click()
        assert faults_of_access(page) == []
        page.get_by_role("button", name="Rename Hi").click()
        assert faults_of_access(page) == []
        page.keyboard.press("Escape")
        if width < 800:
            page.get_by_role("button", name="Conversations", exact=True).click()
            page.get_by_role("button", name="Menu").click()
        page.get_by_role("button", name="Edit this message").click()
        page.get_by_label("Your message").first.wait_for()
        page.locator("h1").evaluate(
            "(h1) => h1.dispatchEvent(new KeyboardEvent('keydown', { key: '?', bubbles: true }))"
        )
        page.get_by_role("dialog").wait_for()
        assert faults_of_access(page) == []
    eyes.media.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_narrow_screen_has_no_sideways_scroll(site: Site, open_page, name) -> None:
    page = open_page(f"{site.url}/#/{name}", viewport={"width": 360, "height": 700})
    page.get_by_role("heading", level=1).wait_for(state="attached")
    widths = "[document.documentElement.scrollWidth, document.getElementById('page').scrollWidth]"
    assert max(page.evaluate(widths)) <= 360


def test_every_page_is_reached_on_a_narrow_screen(site: Site, open_page) -> None:
    page = open_page(site.url, viewport={"width": 390, "height": 700})
    links = page.get_by_role("navigation", name="Pages").get_by_role("link")
    assert not links.first.is_visible()
    for at in range(len(PAGES)):
        page.get_by_role("button", name="Menu").click()
        assert all(link.is_visible() for link in links.all()) and links.count() == len(PAGES)
        name = links.nth(at).inner_text()
        links.nth(at).click()
        page.locator("#here").get_by_text(name).wait_for()
        assert not links.first.is_visible()
    page.get_by_role("button", name="Menu").click()
    assert page.locator(".foot .state").is_visible()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "menu"
    page.evaluate("location.hash = '#/chat'")
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="New conversation").click()
    say(page, "Hi")
    finished(page)


def test_shortcuts_open_pages_and_a_panel_that_lists_them(site: Site, open_page) -> None:
    page = open_page(site.url)
    page.get_by_label("Your message").press("Alt+3")
    page.get_by_role("heading", name="Engine").wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard").get_by_text("Alt + N").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+1")
    page.keyboard.press("/")
    page.keyboard.type("One?")
    page.keyboard.press("Enter")
    finished(page)
    page.keyboard.press("ArrowUp")
    assert page.locator(".message textarea").input_value() == "One?"
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+n")
    page.get_by_text("What would you like to know?").wait_for()


def test_the_text_has_two_sizes(site: Site, open_page) -> None:
    page = open_page(site.url)
    size = "parseFloat(getComputedStyle(document.body).fontSize)"
    normal = page.evaluate(size)
    page.get_by_role("button", name="Text: normal").click()
    page.reload()
    assert page.evaluate(size) > 1.1 * normal


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


def test_the_theme_is_chosen_and_kept(site: Site, open_page) -> None:
    page = open_page(site.url, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Theme: auto").click()
    page.get_by_role("button", name="Theme: light").click()
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
