"""What a browser and a generator of clients see: /, /docs, /openapi.json."""

import base64
import hashlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser

import httpx
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from banyan.requests import generate_request as native
from banyan.requests import sampling_params as sampling
from banyan.requests.sampling_params import parse_sampling
from banyan.server import openapi as bodies
from banyan.server.http.auth import OPEN
from banyan.server.openai.schema import SAMPLING
from banyan.server.routes import all_routes
from tests.server.fakes import Site
from tests.support.cases import check_each
from tests.support.flags import config_of

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
PLAIN = {
    *("html", "head", "meta", "title", "link", "style", "body", "main", "h1", "h2", "h3", "p"),
    *("a", "table", "tr", "th", "td", "pre", "code", "details", "summary"),
}
"""Tags that run nothing and fetch nothing."""
EVERY = [(path, m) for route in all_routes() for path, ms in route.places().items() for m in ms]


class Page(HTMLParser):
    """Links, outside references and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.code: list[str] = []
        self.styles: list[str] = []
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open = tag
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        assert not [name for name, _ in attrs if name == "style" or name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "code":
            self.code.append(data)
        if self._open == "style":
            self.styles.append(data)


@pytest.fixture(scope="module")
def locked() -> Iterator[Site]:
    with Site(config_of("--api-key", "sesame").server).serving() as site:
        yield site


def seen(http: httpx.Client, path: str) -> Page:
    answer = http.get(path, headers=BROWSER)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return Page(answer.text)


def sent(http: httpx.Client, command: str) -> httpx.Response:
    """What curl would send."""
    words = shlex.split(command)
    assert words[0] == "curl" and words[2] == "-d"
    headers = {"content-type": "application/x-www-form-urlencoded"}
    return http.post(words[1], content=words[3].encode(), headers=headers)


def test_programs_get_a_line_and_browsers_a_page(http: httpx.Client) -> None:
    line = http.get("/")
    assert line.text == "Banyan is running\n" and line.headers["content-type"].startswith("text/pl")
    assert http.get("/", headers={"accept": "*/*"}).text == line.text
    text = http.get("/", headers=BROWSER).text
    for fact in ("tiny", "ready", "2 running, 1 waiting", "64 of 8,192 tokens", "4,096 tokens"):
        assert fact in text


def test_the_page_says_what_is_wrong(site: Site, http: httpx.Client) -> None:
    site.state.service = None
    assert "the server is starting" in http.get("/", headers=BROWSER).text
    site.state.dead = "<b>gone</b>"
    assert "&lt;b&gt;gone&lt;/b&gt;" in http.get("/", headers=BROWSER).text


@pytest.fixture(scope="module")
def without_console() -> Iterator[Site]:
    with Site(config_of("--disable-console").server).serving() as site:
        yield site


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_asks_nobody_for_anything(without_console: Site, path: str) -> None:
    answer = without_console.http.get(path, headers=BROWSER)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    page = Page(answer.text)
    assert set(page.tags) <= PLAIN
    assert not [link for link in page.links if re.match(r"[a-z]+://|//", link)]
    digest = base64.b64encode(hashlib.sha256("".join(page.styles).encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy
    assert "prefers-color-scheme: dark" in page.styles[0]


def test_every_link_of_the_pages_leads_somewhere(http: httpx.Client) -> None:
    for path in ("/", "/docs"):
        links = [link for link in seen(http, path).links if not link.startswith("data:")]
        assert links
        for link in links:
            assert http.get(httpx.URL(path).join(link)).status_code == 200, link


def test_the_page_lists_every_route_that_works(http: httpx.Client) -> None:
    shown = set(seen(http, "/").code)
    for route in all_routes():
        for path, methods in route.places().items():
            assert (f"{' '.join(methods)} {path}" in shown) == route.is_available


def test_the_command_on_the_page_works(site: Site, http: httpx.Client) -> None:
    (command,) = [code for code in seen(http, "/").code if code.startswith("curl")]
    answer = sent(http, command)
    assert answer.status_code == 200 and answer.json()["choices"]
    assert "x-banyan-warnings" not in answer.headers
    for change, path in (({"chat": None}, "/v1/completions"), ({"tokenizer": None}, "/generate")):
        site.state.service = replace(site.service, **change)
        (command,) = [code for code in seen(http, "/").code if code.startswith("curl")]
        assert path in command and sent(http, command).status_code == 200


def test_a_host_that_is_no_name_is_not_repeated(http: httpx.Client) -> None:
    site = Site(config_of("--host", "0.0.0.0", "--port", "30123").server)
    with site.serving():
        text = site.http.get("/", headers={**BROWSER, "host": "a'; rm -rf x"}).text
    assert "rm -rf" not in text and "curl http://0.0.0.0:30123/v1" in text


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_behind_a_key_the_page_says_how_to_send_it(locked: Site, path: str) -> None:
    page = locked.http.get(path, headers=BROWSER)
    assert page.status_code == 401 and page.headers["www-authenticate"] == "Bearer"
    assert "Authorization: Bearer" in page.text and "tiny" not in page.text
    line = locked.http.get(path)
    assert line.status_code == 401 and "Authorization: Bearer KEY" in line.json()["message"]
    with_key = {**BROWSER, "authorization": "Bearer sesame"}
    assert locked.http.get(path, headers=with_key).status_code == 200


def test_the_picture_that_browsers_ask_for_is_no_event(
    locked: Site, caplog: pytest.LogCaptureFixture
) -> None:
    assert locked.http.get("/favicon.ico").status_code == 204
    assert not caplog.records


def test_docs_show_every_route_of_the_document(http: httpx.Client) -> None:
    shown = set(seen(http, "/docs").code)
    assert {f"{method} {path}" for path, method in EVERY} <= shown
    assert {"max_completion_tokens", "sampling_params", "label_token_ids"} <= shown


def test_the_document_has_every_path_and_method_and_no_other(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert sorted((p, m.upper()) for p, ms in paths.items() for m in ms) == sorted(EVERY)


def test_the_document_is_valid(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    validate(document)
    operations = [o for methods in document["paths"].values() for o in methods.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids)) and all(o["summary"] and o["tags"] for o in operations)


def test_what_the_document_has_is_answered(http: httpx.Client) -> None:
    def check(case: tuple) -> None:
        path, method = case
        body = None if method in ("GET", "DELETE") else {}
        answer = http.request(method, re.sub(r"\{\w+\}", "x", path), json=body)
        assert answer.status_code != 405
        if answer.status_code == 404:  # there is no such thing, but there is such a route
            assert "no route" not in answer.text and " goes to " not in answer.text

    check_each(EVERY, check)


def schema_of(http: httpx.Client, path: str) -> tuple[dict, dict]:
    document = http.get("/openapi.json").json()
    content = document["paths"][path]["post"]["requestBody"]["content"]
    (form,) = content.values()
    return document, document["components"]["schemas"][form["schema"]["$ref"].rpartition("/")[2]]


READERS = [
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/api/chat", "/api/generate", "/v1/embeddings", "/v1/score", "/v1/rerank"),
]


@pytest.mark.parametrize("path", READERS)
def test_every_field_of_a_schema_is_known_to_its_route(http: httpx.Client, path: str) -> None:
    _, schema = schema_of(http, path)
    for name in schema["properties"]:
        answer = http.post(path, json={name: "x"})
        assert "unknown field" not in answer.headers.get("x-banyan-warnings", ""), name
    reported = http.post(path, json={"no_such_field": "x"}).headers.get("x-banyan-warnings", "")
    assert "no_such_field" in reported


@pytest.mark.parametrize("path", [path for path in READERS if path != "/v1/score"])
def test_a_field_that_a_schema_wants_is_wanted_by_its_route(http: httpx.Client, path: str) -> None:
    _, schema = schema_of(http, path)
    refused = http.post(path, json={})
    assert schema["required"] and refused.status_code == 400
    assert refused.json()["error"]


def test_the_fields_of_sampling_are_those_that_are_read() -> None:
    assert set(bodies.SAMPLING_TYPES) == set(sampling._FIELDS) - set(sampling._UNAVAILABLE)
    assert set(bodies.NATIVE_TYPES) == native._HONOURED | {"session_params"}
    assert set(SAMPLING.values()) <= set(bodies.SAMPLING_TYPES)


TAGGED = {"type": "structural_tag", "format": {"type": "any_text"}}
SAMPLES = (1, 0.5, True, "a", ["a"], [1], {"1": 0.5}, {"type": "object"}, TAGGED)


@pytest.mark.parametrize("name", sorted(set(bodies.SAMPLING_TYPES) - {"custom_params"}))
def test_a_type_of_sampling_says_what_is_accepted(
    site: Site, http: httpx.Client, name: str
) -> None:
    """No value outside of the schema is taken, and some value inside is."""
    document, _ = schema_of(http, "/generate")
    root = {"$ref": "#/components/schemas/SamplingParams", "components": document["components"]}
    limits = replace(site.service.limits, processors=("a",))
    taken = []
    for value in SAMPLES:
        try:
            parse_sampling({name: value}, prompt_len=1, limits=limits)
        except Exception:
            continue
        taken.append(value)
        assert Draft202012Validator(root).is_valid({name: value}), value
    assert taken


def test_open_routes_want_no_key_in_the_document(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    free = {p for p, ms in paths.items() for o in ms.values() if o.get("security") == []}
    assert free == {path for r in all_routes() if r.guard == OPEN for path in r.places()}
