"""Conversations in the console, in a real browser: answers, branches, files, pictures, errors."""

import json

import pytest

from banyan.lora.adapter_files import AdapterPlace
from banyan.requests.lora_names import AdapterNames
from tests.server.fakes import Eyes, Site, steps
from tests.support.console import WATCH, XSS, answers, faults_of_access, finished, say
from tests.support.flags import config_of
from tests.support.pictures import data_url, png


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
