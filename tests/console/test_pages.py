"""The console's pages in a real browser: what they show, access, narrow screens, the keyboard."""

import json
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from banyan.base.ids import RequestId
from banyan.engine_client.metrics_observer import RequestOutcome
from banyan.engine_client.request_log import EndedRequests
from banyan.messages.events import LiveRequest, Reply
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.generation import Usage
from banyan.requests.request_spec import spec_of
from tests.server.fakes import Site, steps
from tests.support.console import (
    MARKDOWN,
    PAGES,
    XSS,
    answers,
    faults_of_access,
    finished,
    say,
)


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
