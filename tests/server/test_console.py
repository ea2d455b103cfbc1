"""The console's files as the server gives them, and the routes that they read. What a browser makes
of them: tests/console."""

import gzip
import hashlib
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import httpx
import msgspec
import pytest

from banyan.base.ids import RequestId
from banyan.engine_client.metrics_observer import RequestOutcome
from banyan.messages.events import LiveRequest, Reply
from banyan.requests.generation import Usage
from banyan.server.console import POLICY, VENDOR, files, shell
from tests.server.fakes import Site
from tests.support.flags import config_of

BROWSER = {"accept": "text/html"}
MOST_BYTES = 200_000
"""Of the console's own files."""
MOST_LOADED = 120_000
"""Of a first visit, as it travels: all own files and the two libraries that every page loads."""
OWN = sorted(name for name in files() if not name.startswith(VENDOR))
MODULES = [name for name in OWN if name.endswith(".js")]
VENDORED = resources.files("banyan.server.console") / "vendor"
OUTSIDE = re.compile(rb"(?:https?:)?//[\w.-]+\.[a-z]{2,}")
NAMESPACE = b"http://www.w3.org/2000/svg"
IMPORTED = re.compile(r'(?:from|import)[ (]"\./([\w./-]+)"')
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
    assert rules["require-trusted-types-for"] == "'script'"
    assert rules["trusted-types"] == "dompurify"
    assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert "unsafe" not in POLICY


def test_the_page_has_no_script_and_no_style_of_its_own() -> None:
    page = shell("").decode()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", page)


KINDS = {
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml; charset=utf-8",
    "woff2": "font/woff2",
}


def test_every_file_is_served_as_what_its_name_says(http: httpx.Client) -> None:
    for name, file in files().items():
        answer = http.get(f"/console/{name}")
        assert answer.status_code == 200 and answer.content == file.body, name
        assert answer.headers["content-type"] == KINDS[name.rpartition(".")[2]]
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = http.get(f"/console/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content


def test_a_browser_keeps_a_library_and_asks_for_newer_files_of_the_console(
    http: httpx.Client,
) -> None:
    for name in ("app.js", f"{VENDOR}dompurify-3.5.0/purify.min.js"):
        keep = http.get(f"/console/{name}").headers["cache-control"]
        assert ("immutable" in keep) == name.startswith(VENDOR)
    for name in files():
        assert name in OWN or re.match(r"vendor/[\w.-]+-\d+\.\d+\.\d+/", name), "no version"


def test_texts_travel_packed_to_those_who_read_gzip(http: httpx.Client) -> None:
    path = f"/console/{VENDOR}katex-0.19.1/katex.min.js"
    with http.stream("GET", path, headers={"accept-encoding": "br, gzip"}) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "gzip" and answer.headers["vary"]
    assert gzip.decompress(raw) == files()[f"{VENDOR}katex-0.19.1/katex.min.js"].body
    assert len(raw) < 100_000
    plain = http.get(path, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers


def test_libraries_are_the_files_of_their_packages() -> None:
    head, *rows = [
        line.split("\t") for line in (VENDORED / "vendored.tsv").read_text().splitlines()
    ]
    assert head == ["file", "package", "version", "licence", "path in the package", "sha256"]
    listed = {row[0]: row[-1] for row in rows}
    found = {}
    for folder in (entry for entry in VENDORED.iterdir() if entry.is_dir()):
        for file in Path(str(folder)).rglob("*"):
            if file.is_file():
                name = f"{folder.name}/{file.relative_to(str(folder))}"
                found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    assert found == listed
    licences = {name.partition("/")[0] for name in listed if name.endswith("/LICENSE")}
    assert licences == {name.partition("/")[0] for name in listed}
    assert all(row[2] in row[0] and row[3] for row in rows)


@pytest.mark.parametrize("tail", ["", "index.html", "files.py", "../files.py", "no.js", "%2e%2e/x"])
def test_nothing_else_of_the_folder_is_a_file_of_the_console(http: httpx.Client, tail: str) -> None:
    assert http.get(f"/console/{tail}").status_code == 404


def test_all_of_it_is_small() -> None:
    assert sum(len(files()[name].body) for name in OWN) + len(shell("")) < MOST_BYTES
    first = [*OWN, *(name for name in files() if re.search("markdown-it|purify", name))]
    assert sum(len(files()[name].packed) for name in first) < MOST_LOADED


@pytest.mark.parametrize("name", OWN)
def test_no_file_names_a_place_outside(name: str) -> None:
    assert not OUTSIDE.search(files()[name].body.replace(NAMESPACE, b""))
    assert b"url(" not in files()[name].body and b"@import" not in files()[name].body


def test_the_fonts_of_formulas_come_from_this_server() -> None:
    folder = f"{VENDOR}katex-0.19.1/"
    sheet = files()[f"{folder}katex.min.css"].body.decode()
    used = re.findall(r"url\(([^)]*)\)", sheet)
    assert {f"{folder}{name}" for name in used if name.endswith(".woff2")} == {
        name for name in files() if name.endswith(".woff2")
    }
    assert all(name.startswith("fonts/") for name in used) and "@import" not in sheet


@pytest.mark.parametrize("name", MODULES)
def test_no_module_makes_markup_or_code_of_a_text(name: str) -> None:
    assert not MAKES_MARKUP.search(files()[name].body)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_that_is_imported_is_there_and_says_what_it_is(name: str) -> None:
    text = files()[name].body.decode()
    assert text.startswith("// ")
    for other in IMPORTED.findall(text):
        assert other in files()


def test_every_module_is_reached() -> None:
    found, left = set(), ["app.js"]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            text = "" if name.startswith(VENDOR) else files()[name].body.decode()
            left += IMPORTED.findall(text)
    scripts = {name for name in files() if re.search(r"\.m?js$", name)}
    assert found == scripts


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


def reply_of(*requests: LiveRequest) -> Reply:
    return Reply(1, True, body=msgspec.json.encode(requests))


def test_requests_are_listed_with_their_phase_and_numbers(site: Site, http: httpx.Client) -> None:
    site.client.reply = reply_of(live("a"), live("ended"))
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
        site.client.reply = reply_of(live("a"), live("b"))
        with_open(site, {"a": tenants["one"], "b": tenants["two"]})

        def seen(key: str) -> list[str]:
            answer = site.http.get("/requests", headers={"authorization": f"Bearer {key}"})
            return [one["rid"] for one in answer.json()["requests"]]

        assert seen("one") == ["a"] and seen("two") == ["b"] and seen("root") == ["a", "b"]
        assert site.http.get("/requests").status_code == 401


def test_ended_requests_are_those_of_the_caller() -> None:
    server = config_of("--api-key", "one two", "--admin-api-key", "root").server
    with Site(server).serving() as site:
        site.client.reply = reply_of()
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            site.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            spec = site.generator.asked[-1]
            site.state.ended.ended(RequestOutcome(spec, Usage(1, 2), "stop", 2.0, 1.0))

        def seen(key: str) -> int:
            answer = site.http.get(
                "/requests?ended=true", headers={"authorization": f"Bearer {key}"}
            )
            return len(answer.json()["ended"])

        assert seen("one") == seen("two") == 1 and seen("root") == 2
        plain = site.http.get("/requests", headers={"authorization": "Bearer one"})
        assert "ended" not in plain.json()


def test_the_load_of_the_last_hour_is_given_when_asked_for(site: Site, http: httpx.Client) -> None:
    site.state.history.sample(site.client.replicas(), 5.0)
    found = http.get("/v1/loads?include=core,history").json()["history"]
    assert found[-1]["at"] == 5.0 and found[-1]["running"] == 2 and found[-1]["used"] == 64
    assert "history" not in http.get("/v1/loads").json()


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
