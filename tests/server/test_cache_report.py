"""What a prompt found in the cache, and why no more, on every route, whole and streamed."""

import json
from collections.abc import Iterator
from dataclasses import replace

import openai
import pytest
from msgspec import structs

from banyan.config.schema import CacheConfig, ServerConfig
from banyan.requests.generation import Usage
from tests.server.fakes import Site
from tests.support.scripted import scripted

USER = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "tiny", "messages": USER}
WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
SPARE = Usage(0, 0, cached_tokens=40, stored_tokens=32, cache_miss="evicted")
OPENAI = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"n": 3}),
    ("/v1/completions", {"model": "tiny", "prompt": "ab"}),
    ("/v1/completions", {"model": "tiny", "prompt": "ab", "n": 2, "best_of": 2}),
]
PLACES = {
    "": {"device": 40, "host": 0},
    "file": {"device": 8, "host": 0, "storage": 32, "storage_backend": "file"},
    "host": {"device": 8, "host": 32, "storage": 0, "storage_backend": "host"},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Site]:
    with Site().serving() as site:
        yield site


@pytest.fixture
def site(served: Site) -> Site:
    """A server that reports nothing unless it is asked."""
    served.generator.found = SPARE
    served.state.config = replace(served.state.config, server=ServerConfig(), cache=CacheConfig())
    return served


@pytest.fixture
def reporting(site: Site) -> Site:
    site.state.config = replace(site.state.config, server=ServerConfig(cache_report=True))
    return site


def last(site: Site, path: str, body: dict, stream: bool) -> dict:
    """The body of an answer, or the last event or line of a stream of it."""
    answer = site.http.post(path, json={**body, "stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")][-1]


@WAYS
@pytest.mark.parametrize("store", PLACES)
def test_openai_answers_tell_where_cached_tokens_lay_when_they_are_asked(
    site: Site, stream: bool, store: str
) -> None:
    site.state.config = replace(site.state.config, cache=CacheConfig(store=store))
    site.generator.found = structs.replace(SPARE, stored_tokens=32 if store else 0)
    for path, body in OPENAI:
        reported = last(site, path, {**body, "return_cached_tokens_details": True}, stream)
        where = PLACES[store]
        assert reported["sglext"] == {"cached_tokens_details": where, "cache_miss": "evicted"}
        assert not reported["choices"] if stream else reported["choices"]
        unasked = last(site, path, {**body, "return_cached_tokens_details": None}, stream)
        assert "sglext" not in unasked


@WAYS
def test_usage_tells_why_no_more_was_cached(reporting: Site, stream: bool) -> None:
    for path, body in OPENAI:
        reporting.generator.found = SPARE
        asked = {**body, "stream_options": {"include_usage": True}} if stream else body
        reported = last(reporting, path, asked, stream)["usage"]["prompt_tokens_details"]
        assert reported == {"cached_tokens": 40, "cache_miss": "evicted"}
        reporting.generator.found = structs.replace(SPARE, cache_miss="")
        reported = last(reporting, path, asked, stream)["usage"]["prompt_tokens_details"]
        assert reported == {"cached_tokens": 40}, "everything came that could"


def test_several_prompts_tell_each_reason_once(
    reporting: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = iter(("unseen", "evicted", "", "unseen"))
    generator, generate = reporting.generator, reporting.generator.generate
    generator.found = SPARE

    @scripted
    async def one_by_one(request):
        why = next(reasons)
        async for chunk in generate(request):
            yield structs.replace(chunk, usage=structs.replace(chunk.usage, cache_miss=why))

    monkeypatch.setattr(generator, "generate", one_by_one)
    body = {"model": "tiny", "prompt": ["a", "b", "c", "d"], "return_cached_tokens_details": True}
    answer = last(reporting, "/v1/completions", body, stream=False)
    details = answer["sglext"]["cached_tokens_details"]
    assert (details["device"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == (
        4 * 8,
        4 * 40,
    )
    reported = {
        answer["sglext"]["cache_miss"],
        answer["usage"]["prompt_tokens_details"]["cache_miss"],
    }
    assert len(reported) == 1 and sorted(reported.pop().split(",")) == ["evicted", "unseen"]


def test_the_client_of_openai_reads_both(reporting: Site) -> None:
    with openai.OpenAI(base_url=f"{reporting.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=USER, extra_body={"return_cached_tokens_details": True}
        )
        details = answer.usage.prompt_tokens_details
        assert (details.cached_tokens, details.model_extra) == (40, {"cache_miss": "evicted"})
        assert answer.model_extra["sglext"]["cache_miss"] == "evicted"
        stream = client.chat.completions.create(
            model="tiny",
            messages=USER,
            stream=True,
            extra_body={"return_cached_tokens_details": True},
        )
        found = [chunk.model_extra["sglext"] for chunk in stream if "sglext" in chunk.model_extra]
        assert [each["cache_miss"] for each in found] == ["evicted"]


@WAYS
def test_messages_and_responses_tell_it_in_their_usage(reporting: Site, stream: bool) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": USER}
    answer = reporting.http.post("/v1/messages", json={**body, "stream": stream})
    assert '"cache_read_input_tokens":40' in answer.text.replace(" ", "")
    assert '"cache_miss":"evicted"' in answer.text.replace(" ", "")
    body = {"model": "tiny", "input": "Hi"}
    reported = last(reporting, "/v1/responses", body, stream)
    usage = reported.get("response", reported)["usage"]["input_tokens_details"]
    assert (usage["cached_tokens"], usage["cache_miss"]) == (40, "evicted")


@WAYS
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollama_answers_tell_it_where_they_count(reporting: Site, path: str, stream: bool) -> None:
    body = {"model": "tiny", "messages": USER} if path == "/api/chat" else {"model": "tiny"}
    reported = last(
        reporting, path, body | ({} if "messages" in body else {"prompt": "Hi"}), stream
    )
    assert (reported["cached_tokens"], reported["cache_miss"]) == (40, "evicted")


@WAYS
def test_nothing_is_reported_unless_the_server_reports_it(site: Site, stream: bool) -> None:
    for path, body in (
        ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": USER}),
        ("/v1/responses", {"model": "tiny", "input": "Hi"}),
        ("/api/chat", {"model": "tiny", "messages": USER}),
    ):
        if not stream and "stream_options" in body:
            body = CHAT
        answer = site.http.post(path, json={**body, "stream": stream})
        assert answer.status_code == 200 and "cache_miss" not in answer.text, path
