"""Dialects: what goes out, and what is read from what comes back, however it is cut."""

from dataclasses import replace

import orjson
import pytest

from banyan.bench.datasets import Prompt
from banyan.bench.dialects import (
    CHAT,
    COMPLETIONS,
    NATIVE,
    BenchAPI,
    RequestOptions,
    events,
    read_reply,
    request_body,
)
from banyan.bench.http import ExchangeError, HttpResponse
from tests.bench.scripted import DONE, completion_stream, event, native_stream

PROMPT = Prompt("two words", [5, 6], 2, 7)


def reply(pieces: list[bytes], status: int = 200) -> HttpResponse:
    """Pieces that came one second apart."""
    return HttpResponse(100.0, status, [(101.0 + n, piece) for n, piece in enumerate(pieces)])


def test_events_are_found_however_the_bytes_are_cut() -> None:
    stream = b"data: one\n\n: note\n\ndata: two\n\nevent: x\ndata: three\n\n"
    for size in range(1, len(stream) + 1):
        pieces = [(float(i), stream[i : i + size]) for i in range(0, len(stream), size)]
        assert [raw for _, raw in events(pieces)] == [b"one", b"two", b"three"]


def test_an_event_arrives_with_the_piece_that_ends_it() -> None:
    pieces = [(1.0, b"data: on"), (2.0, b"e\n\ndata: two\n\n"), (3.0, b"data: three\n\n")]
    assert [at for at, _ in events(pieces)] == [2.0, 2.0, 3.0]


@pytest.mark.parametrize("send_ids", [True, False])
def test_ids_go_out_only_where_they_are_wanted_and_taken(send_ids: bool) -> None:
    request_options = RequestOptions("m", send_ids=send_ids)
    native = orjson.loads(request_body(NATIVE, PROMPT, request_options))
    assert native.get("input_ids") == ([5, 6] if send_ids else None)
    assert native.get("text") == (None if send_ids else "two words")
    completions = orjson.loads(request_body(COMPLETIONS, PROMPT, request_options))
    assert completions["prompt"] == ([5, 6] if send_ids else "two words")
    chat = orjson.loads(request_body(CHAT, PROMPT, request_options))
    assert chat["messages"] == [{"role": "user", "content": "two words"}]


def test_pictures_go_before_the_text_of_a_message() -> None:
    prompt = replace(PROMPT, images=("data:image/png;base64,aa",))
    body = orjson.loads(request_body(CHAT, prompt, RequestOptions("m")))
    picture, text = body["messages"][0]["content"]
    assert picture == {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
    assert text == {"type": "text", "text": PROMPT.text}


def test_extra_fields_win_over_the_rest() -> None:
    request_options = RequestOptions("m", extra={"temperature": 0.5, "min_tokens": 7})
    body = orjson.loads(request_body(COMPLETIONS, PROMPT, request_options))
    assert body["temperature"] == 0.5
    assert body["min_tokens"] == 7
    assert body["max_tokens"] == 7


def test_native_answers_are_counted_by_the_server() -> None:
    answer = read_reply(NATIVE, reply(native_stream(12, ["a", "b", "c"], cached=8).pieces), True)
    assert answer.times == [(101.0, 1), (102.0, 2), (103.0, 3)]
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (12, 3, 8)
    assert answer.is_counted
    assert "".join(answer.text) == "abc"


def test_incremental_native_text_is_put_together() -> None:
    def piece(text: str, made: int) -> bytes:
        return event({"text": text, "meta_info": {"completion_tokens": made}})

    pieces = [piece("Hel", 1), piece("lo", 2), piece(" you", 4), DONE]
    answer = read_reply(NATIVE, reply(pieces), True)
    assert "".join(answer.text) == "Hello you"
    assert answer.times == [(101.0, 1), (102.0, 2), (103.0, 4)]


def test_an_event_without_new_tokens_moves_no_clock() -> None:
    pieces = native_stream(3, ["a", "b"]).pieces
    answer = read_reply(NATIVE, reply([pieces[0], pieces[0], pieces[1], DONE]), True)
    assert answer.times == [(101.0, 1), (103.0, 2)]


def test_completions_take_their_count_from_usage() -> None:
    answer = read_reply(COMPLETIONS, reply(completion_stream(9, ["a", "b", "", "d"]).pieces), True)
    assert [at for at, _ in answer.times] == [101.0, 102.0, 103.0, 104.0]
    assert (answer.prompt_tokens, answer.output_tokens, answer.is_counted) == (9, 4, True)


def test_usage_in_every_chunk_counts_tokens_that_came_together() -> None:
    def chunk(text: str, made: int) -> bytes:
        choice = {"text": text, "finish_reason": None}
        usage = {"prompt_tokens": 4, "completion_tokens": made}
        return event({"choices": [choice], "usage": usage})

    answer = read_reply(COMPLETIONS, reply([chunk("a", 1), chunk("bcd", 4), DONE]), True)
    assert answer.times == [(101.0, 1), (102.0, 4)]


def test_without_usage_events_are_counted_and_it_is_said() -> None:
    pieces = [*completion_stream(9, ["a", "b"]).pieces[:2], DONE]
    answer = read_reply(COMPLETIONS, reply(pieces), True)
    assert (answer.output_tokens, answer.is_counted) == (2, False)


def test_a_role_alone_is_no_token() -> None:
    def chunk(**delta: str) -> bytes:
        return event({"choices": [{"delta": delta, "finish_reason": None}]})

    pieces = [
        chunk(role="assistant", content=""),
        chunk(reasoning_content="hm"),
        chunk(content="a"),
    ]
    answer = read_reply(CHAT, reply([*pieces, DONE]), True)
    assert answer.times == [(102.0, 1), (103.0, 2)]
    assert "".join(answer.text) == "hma"


def test_an_unstreamed_answer_comes_all_at_once() -> None:
    body = {"choices": [{"text": "abc"}], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
    answer = read_reply(COMPLETIONS, reply([orjson.dumps(body)]), False)
    assert answer.times == [(101.0, 3)]
    assert answer.output_tokens == 3


@pytest.mark.parametrize(
    ("dialect", "pieces", "status", "text"),
    [
        (NATIVE, [b'{"error": {"message": "queue is full"}}'], 503, "HTTP 503: queue is full"),
        (NATIVE, [b"Bad Gateway"], 502, "HTTP 502: Bad Gateway"),
        (NATIVE, [event({"error": {"message": "died"}}), DONE], 200, "error in the answer: died"),
        (NATIVE, native_stream(3, ["a"]).pieces[:1], 200, r"without \[DONE\]"),
        (NATIVE, [DONE], 200, "no tokens"),
        (NATIVE, [event({"text": "a"}), DONE], 200, "without meta_info"),
        (COMPLETIONS, [b"data: {\n\n"], 200, "not JSON"),
        (COMPLETIONS, [event([1]), DONE], 200, "no JSON object"),
    ],
)
def test_what_is_no_answer_is_an_error_with_its_reason(
    dialect: BenchAPI, pieces: list[bytes], status: int, text: str
) -> None:
    with pytest.raises(ExchangeError, match=text):
        read_reply(dialect, reply(pieces, status), True)


def test_a_request_that_the_server_gave_up_has_failed() -> None:
    reason = {"type": "abort", "message": "out of pages"}
    piece = event({"text": "", "meta_info": {"completion_tokens": 1, "finish_reason": reason}})
    with pytest.raises(ExchangeError, match="out of pages"):
        read_reply(NATIVE, reply([piece, DONE]), True)
