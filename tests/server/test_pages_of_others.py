"""Who may call besides programs: names of the server behind a proxy, and web pages of others."""

import json
from collections.abc import Iterator

import httpx
import pytest

from banyan.base.errors import ConfigError, RequestError
from banyan.server.http import auth
from banyan.server.http.auth import Guard, Keys
from banyan.server.http.listen import check_exposure
from tests.server.fakes import Site
from tests.support.flags import config_of

PAGE = "http://localhost:3000"
FOREIGN = "https://app.example"
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def known() -> Iterator[Site]:
    """A server that was given a name and the origin of a page."""
    flags = ("--allowed-hosts", "models.example", "--allowed-origins", f"{PAGE},{FOREIGN}")
    with Site(config_of(*flags).server).serving() as site:
        yield site


def test_a_server_answers_to_a_name_it_was_given(known: Site) -> None:
    def status(host: str) -> int:
        return known.http.get("/v1/models", headers={"host": host}).status_code

    assert status("models.example") == status("Models.Example:443") == status("localhost") == 200
    assert status("evil.example") == 421


def test_a_page_of_an_allowed_origin_asks_and_reads_the_answer(known: Site) -> None:
    wanted = "authorization, content-type, x-stainless-os"
    asks = {"access-control-request-method": "POST", "access-control-request-headers": wanted}
    site = {"origin": FOREIGN, "sec-fetch-site": "cross-site"}
    path = "/v1/chat/completions"
    before = known.http.options(path, headers={**site, **asks})
    assert before.status_code == 204
    assert before.headers["access-control-allow-origin"] == FOREIGN
    assert before.headers["access-control-allow-headers"] == wanted
    assert "POST" in before.headers["access-control-allow-methods"]
    for stream in (False, True):
        answer = known.http.post(path, json={"messages": USER, "stream": stream}, headers=site)
        assert answer.status_code == 200 and "lo" in answer.text
        assert answer.headers["access-control-allow-origin"] == FOREIGN
        assert answer.headers["vary"] == "origin"
    refused = known.http.post(path, json={"messages": 1}, headers=site)
    assert refused.status_code == 400
    assert refused.headers["access-control-allow-origin"] == FOREIGN


@pytest.mark.parametrize("origin", ["https://app.example.evil", "http://app.example", "null"])
def test_a_page_of_no_other_origin_gets_in(known: Site, origin: str) -> None:
    answer = known.http.get("/v1/models", headers={"origin": origin})
    assert answer.status_code == 403 and "--allowed-origins" in answer.json()["message"]
    assert "access-control-allow-origin" not in answer.headers


def test_nothing_is_allowed_to_pages_unless_it_was_given(http: httpx.Client) -> None:
    own = http.get("/v1/models", headers={"origin": PAGE})
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers
    assert http.options("/generate", headers={"origin": FOREIGN}).status_code == 403


def test_headers_of_a_page_that_are_no_names_are_not_repeated(known: Site) -> None:
    asks = {"origin": PAGE, "access-control-request-headers": "a: b; c"}
    assert (
        known.http.options("/generate", headers=asks).headers["access-control-allow-headers"] == ""
    )


@pytest.mark.parametrize("origins", ["*", FOREIGN])
def test_without_a_key_no_page_of_others_gets_to_admin_routes(origins: str) -> None:
    guard = Guard(Keys(""), "", "127.0.0.1", "", origins)
    page = guard.check_origin("127.0.0.1:30000", FOREIGN, "cross-site")
    assert page == FOREIGN
    assert guard.judge(auth.KEY, b"", "127.0.0.1", "localhost", page).status == 200
    assert guard.judge(auth.ADMIN, b"", "127.0.0.1", "localhost", page).status == 403
    assert guard.judge(auth.ADMIN, b"", "127.0.0.1", "localhost", "").status == 200


def test_what_a_proxy_forwards_gets_to_no_admin_route_without_a_key() -> None:
    guard = Guard(Keys(""), "", "127.0.0.1", "models.example")
    assert guard.judge(auth.ADMIN, b"", "127.0.0.1", "models.example").status == 403


def test_names_are_checked_on_every_address_once_they_are_given() -> None:
    named = Guard(Keys("key"), "", "0.0.0.0", "models.example")
    named.check_origin("models.example", "", "")
    named.check_origin("127.0.0.1:30000", "", "")
    with pytest.raises(Exception, match="own names"):
        named.check_origin("other.example", "", "")
    Guard(Keys(""), "", "127.0.0.1", "*").check_origin("other.example", "", "")


def test_origins_come_as_a_list_of_json_too() -> None:
    listed = config_of("--allowed-origins", '["http://a", "http://b"]').server.allowed_origins
    assert listed == "http://a,http://b"


def test_any_page_without_a_key_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_exposure(config_of("--allowed-origins", "*", "--api-key", "k").server)
    assert not caplog.records
    check_exposure(config_of("--allowed-origins", "*").server)
    assert "any web page" in caplog.text


def test_what_is_no_origin_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="localhost:3000' is no origin"):
        Guard(Keys(""), "", "127.0.0.1", "", "localhost:3000")


@pytest.mark.parametrize("kind", ["", "application/x-www-form-urlencoded", "text/plain"])
def test_json_is_read_whatever_curl_calls_it(http: httpx.Client, kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    body = json.dumps({"messages": USER}).encode()
    answer = http.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    page = {**headers, "origin": FOREIGN, "sec-fetch-site": "cross-site"}
    assert http.post("/v1/chat/completions", content=body, headers=page).status_code == 403


def test_a_text_and_its_hint_have_one_full_stop_between() -> None:
    assert str(RequestError("It is so.", hint="do this")) == "It is so. Do this"


def test_the_answer_to_a_body_that_is_no_json_names_the_missing_header(http: httpx.Client) -> None:
    form = http.post("/v1/chat/completions", data={"messages": "Hi"})
    assert form.status_code == 400
    assert "-H 'Content-Type: application/json'" in form.json()["message"]
    assert "application/x-www-form-urlencoded" in form.json()["message"]
    declared = {"content-type": "application/json"}
    answer = http.post("/v1/chat/completions", content=b"{", headers=declared).json()["message"]
    assert "Content-Type" not in answer


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/models", "/v1/models"),
        ("/models", "/v1/models"),
        ("/V1/Messages", "/v1/messages"),
        ("/completions", "/v1/completions"),
    ],
)
def test_a_path_that_is_nearly_one_names_it(http: httpx.Client, path: str, meant: str) -> None:
    answer = http.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["message"].endswith(f"Did you mean {meant}?")


@pytest.mark.parametrize("path", ["/nope", "/v1", "/" + "x" * 10_000])
def test_a_path_that_is_like_none_says_where_the_routes_are(http: httpx.Client, path: str) -> None:
    assert http.get(path).json()["message"].endswith("GET /openapi.json lists the routes")
