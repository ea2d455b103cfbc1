"""Answers in the console, in a real browser: Markdown, formulas, code, and hostile markup."""

import json

from tests.server.fakes import Site, steps
from tests.support.console import (
    MARKDOWN,
    PAGES,
    WATCH,
    XSS,
    answers,
    finished,
    say,
    show,
)


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
