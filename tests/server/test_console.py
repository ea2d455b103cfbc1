"""The console's files as the server gives them, and the routes that they read. What a browser makes
of them: tests/console."""

import re
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from banyan.base.ids import RequestId
from banyan.messages.events import LiveRequest, Reply
from banyan.server.console import POLICY, files, shell
from tests.server.fakes import Site
from tests.support.flags import config_of

BROWSER = {"accept": "text/html"}
MOST_BYTES = 100_000
"""Of everything that the console loads."""
MODULES = sorted(name for name in files() if name.endswith(".js"))
OUTSIDE = re.compile(rb"(?:https?:)?//[\w.-]+\.[a-z]{2,}")
NAMESPACE = b"http://www.w3.org/2000/svg"
MAKES_MARKUP = re.compile(
    rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function"
    rb"|setHTML|srcdoc|createContextualFragment"
)


@pytest.fixture(scope="module")
def locked() -> Iterator[Site]:
    with Site(config_of("--api-key", "sesame").server).serving() as site:
        yield site


def test_a_browser_gets_the_console_and_who_runs_no_scripts_the_facts(http: httpx.Client) -> None:
    answer = http.get("/", headers=BROWSER)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == POLICY
    shown, _, rest = answer.text.partition("<noscript>")[2].partition("</noscript>")
    assert "2 running, 1 waiting" in shown and "/v1/chat/completions" in shown
    assert '<main class="page" id="page"' in rest


def test_the_policy_lets_nothing_run_but_files_of_this_server() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in POLICY.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'" and rules["trusted-types"] == "'none'"
    assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert "unsafe" not in POLICY


def test_the_page_has_no_script_and_no_style_of_its_own() -> None:
    page = shell("").decode()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", page)


@pytest.mark.parametrize("name", sorted(files()))
def test_a_file_is_what_its_name_says(http: httpx.Client, name: str) -> None:
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    answer = http.get(f"/console/{name}")
    assert answer.status_code == 200 and answer.content == files()[name].body
    kind = kinds[name.rpartition(".")[2]]
    assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = http.get(f"/console/{name}", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304 and not again.content


@pytest.mark.parametrize("tail", ["", "index.html", "files.py", "../files.py", "no.js", "%2e%2e/x"])
def test_nothing_else_of_the_folder_is_a_file_of_the_console(http: httpx.Client, tail: str) -> None:
    assert http.get(f"/console/{tail}").status_code == 404


def test_all_of_it_is_small() -> None:
    assert sum(len(file.body) for file in files().values()) + len(shell("")) < MOST_BYTES


@pytest.mark.parametrize("name", sorted(files()))
def test_no_file_names_a_place_outside(name: str) -> None:
    assert not OUTSIDE.search(files()[name].body.replace(NAMESPACE, b""))
    assert b"url(" not in files()[name].body and b"@import" not in files()[name].body


@pytest.mark.parametrize("name", MODULES)
def test_no_module_makes_markup_or_code_of_a_text(name: str) -> None:
    assert not MAKES_MARKUP.search(files()[name].body)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_that_is_imported_is_there_and_says_what_it_is(name: str) -> None:
    text = files()[name].body.decode()
    assert text.startswith("// ")
    for other in re.findall(r'from "\./([\w.]+)"', text):
        assert other in files()


def test_every_module_is_reached() -> None:
    found, left = set(), ["app.js"]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += re.findall(r'from "\./([\w.]+)"', files()[name].body.decode())
    assert found == set(MODULES)


def test_behind_a_key_the_files_are_open_and_tell_nothing(locked: Site) -> None:
    page = locked.http.get("/", headers=BROWSER)
    assert page.status_code == 401 and "app.js" in page.text
    assert "Authorization: Bearer" in page.text and "tiny" not in page.text
    assert locked.http.get("/console/app.js").status_code == 200
    for path in ("/v1/models", "/server_info", "/requests", "/v1/loads", "/openapi.json"):
        assert locked.http.get(path).status_code == 401, path


def test_a_server_without_the_console_has_a_plain_page() -> None:
    with Site(config_of("--disable-console").server).serving() as site:
        page = site.http.get("/", headers=BROWSER)
        assert page.status_code == 200 and "2 running, 1 waiting" in page.text
        assert "<script" not in page.text
        assert site.http.get("/console/app.js").status_code == 404
        assert "/console/{file}" not in site.http.get("/openapi.json").json()["paths"]


def live(rid: str, phase: str = "decode") -> LiveRequest:
    return LiveRequest(RequestId(rid), phase, 10, 14, 8, 4, 1.5, 0.25)


def told(*requests: LiveRequest) -> Reply:
    return Reply(1, True, body=msgspec.json.encode(requests))


def test_requests_are_listed_with_their_phase_and_numbers(site: Site, http: httpx.Client) -> None:
    site.client.reply = told(live("a"), live("ended"))
    with_open(site, {"a": b"", "b": b""})
    answer = http.get("/requests").json()
    assert answer["open"] == 2
    assert answer["requests"] == [
        {
            **{"rid": "a", "dp_rank": 0, "phase": "decode", "prompt_tokens": 10},
            **{"computed_tokens": 14, "cached_tokens": 8, "output_tokens": 4},
            **{"age_s": 1.5, "queue_s": 0.25, "retractions": 0},
        }
    ]


def with_open(site: Site, owners: dict[str, bytes]) -> None:
    site.state.open._live = {RequestId(rid): owner for rid, owner in owners.items()}


def test_a_key_sees_its_own_requests_and_the_administrator_all() -> None:
    server = config_of("--api-key", "one two", "--admin-api-key", "root").server
    with Site(server).serving() as site:
        tenants = {}
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            site.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            tenants[key] = site.generator.asked[-1].message.caller
        site.client.reply = told(live("a"), live("b"))
        with_open(site, {"a": tenants["one"], "b": tenants["two"]})

        def seen(key: str) -> list[str]:
            answer = site.http.get("/requests", headers={"authorization": f"Bearer {key}"})
            return [one["rid"] for one in answer.json()["requests"]]

        assert seen("one") == ["a"] and seen("two") == ["b"] and seen("root") == ["a", "b"]
        assert site.http.get("/requests").status_code == 401


def test_without_a_key_strangers_may_not_list_requests(site: Site, http: httpx.Client) -> None:
    with Site(config_of("--host", "0.0.0.0").server).serving() as open_to_all:
        answer = open_to_all.http.get("/requests", headers={"host": "box.example"})
        assert answer.status_code == 403 and "--api-key" in answer.text


def test_settings_say_who_has_set_them() -> None:
    config = config_of("--page-size", "32", "--api-key", "sesame")
    site = Site(config.server)
    site.state.config = config
    with site.serving():
        info = site.http.get("/server_info", headers={"authorization": "Bearer sesame"}).json()
    assert info["origins"]["page_size"] == "flag --page-size"
    assert info["origins"]["port"] == "default"
    assert "api_key" not in info["origins"] and "sesame" not in str(info)
    assert set(info["origins"]) <= set(info)
