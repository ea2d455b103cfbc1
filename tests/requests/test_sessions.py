"""Sessions: which tokens a turn goes on from, and when a session ends."""

import asyncio

import pytest

from banyan.base.clock import VirtualClock
from banyan.base.errors import RequestError
from banyan.requests.sampling_params import Limits
from banyan.requests.sessions import MAX_IDLE_S, Begun, Sessions

LIMITS = Limits(context_length=200, vocab_size=99)


def begin(sessions: Sessions, body: dict[str, object], tenant: bytes = b"") -> Begun | None:
    return asyncio.run(sessions.begin(body, None, LIMITS, tenant))


def turn(sessions: Sessions, ids: list[int], output: list[int], name: str, **params) -> list[int]:
    """Play a turn to its end; returns the prompt it had."""
    body = {"input_ids": ids, "rid": name, "session_params": {"id": "s", **params}}
    begun = begin(sessions, body)
    assert begun is not None and begun.body["rid"] == name
    assert "session_params" not in begun.body
    begun.keep(output)
    return begun.body["input_ids"]


@pytest.fixture
def sessions() -> Sessions:
    found = Sessions(VirtualClock())
    assert found.open(100, "s") == "s"
    assert turn(found, [1, 2], [3], "a") == [1, 2]
    return found


def test_a_turn_goes_on_from_the_prompt_and_answer_it_names(sessions):
    assert turn(sessions, [4], [5, 6], "b", rid="a") == [1, 2, 3, 4]
    assert turn(sessions, [7], [], "c", rid="b") == [1, 2, 3, 4, 5, 6, 7]


def test_turns_may_branch_from_any_earlier_one(sessions):
    assert turn(sessions, [4], [5], "b", rid="a") == [1, 2, 3, 4]
    assert turn(sessions, [8], [9], "c", rid="a") == [1, 2, 3, 8]


def test_a_turn_without_a_name_starts_anew(sessions):
    assert turn(sessions, [9], [], "b") == [9]


@pytest.mark.parametrize(
    ("params", "prompt"),
    [
        ({"offset": 1}, [1, 9]),
        ({"offset": 0}, [1, 2, 3, 9]),
        ({"offset": -1}, [1, 2, 3, 9]),
        ({"drop_previous_output": True}, [1, 2, 9]),
        ({"drop_previous_output": True, "offset": 1}, [1, 9]),
    ],
)
def test_a_part_of_the_history_can_be_kept(sessions, params, prompt):
    assert turn(sessions, [9], [], "b", rid="a", **params) == prompt


def test_replacing_forgets_what_came_later(sessions):
    turn(sessions, [4], [5], "b", rid="a")
    turn(sessions, [6], [7], "c", rid="a", replace=True)
    with pytest.raises(RequestError, match="no finished turn 'b'"):
        turn(sessions, [1], [], "d", rid="b")


def test_a_streaming_session_appends_one_turn_at_a_time(sessions):
    sessions.open(12, "live", is_streaming=True)
    body = {"session_params": {"id": "live"}}
    first = begin(sessions, {"input_ids": [1, 2], **body})
    with pytest.raises(RequestError, match="has not ended"):
        begin(sessions, {"input_ids": [3], **body})
    first.keep([5])
    first.end()
    failed = begin(sessions, {"input_ids": [7], **body})
    assert failed.body["input_ids"] == [1, 2, 5, 7]
    failed.end()  # without an answer, so the next turn goes on from the first
    for given, text in (
        ({"input_ids": [9] * 10, **body}, "has 13 tokens"),
        ({"input_ids": [9], "session_params": {"id": "live", "offset": 1}}, "has only id"),
        ({"input_ids": [9], "session_params": {"id": "live", "rid": "x"}}, "has only id"),
    ):
        with pytest.raises(RequestError, match=text):
            begin(sessions, given)
    last = begin(sessions, {"input_ids": [8], **body})
    assert last.body["input_ids"] == [1, 2, 5, 8]


def test_a_turn_that_has_not_ended_cannot_be_gone_on_from(sessions):
    begin(sessions, {"input_ids": [4], "rid": "b", "session_params": {"id": "s", "rid": "a"}})
    with pytest.raises(RequestError, match="no finished turn"):
        turn(sessions, [5], [], "c", rid="b")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"input_ids": [1], "session_params": {"id": "x"}}, "'x' is not open"),
        ({"input_ids": [1], "session_params": {"id": "s", "rids": 1}}, "must be an object with"),
        ({"input_ids": [1], "session_params": ["s"]}, "must be an object with"),
        ({"input_ids": [[1]], "session_params": {"id": "s"}}, "one prompt"),
        ({"session_params": {"id": "s"}}, "Exactly one of"),
        ({"input_ids": [1] * 101, "session_params": {"id": "s"}}, "101 tokens"),
        ({"input_ids": [1], "rid": "a", "session_params": {"id": "s"}}, "has a turn a"),
        ({"input_ids": [1], "session_params": {"id": "s", "rid": "a", "offset": "1"}}, "offset"),
    ],
)
def test_turns_that_make_no_sense_are_refused(sessions, body, text):
    with pytest.raises(RequestError, match=text):
        begin(sessions, body)


def test_a_session_belongs_to_who_opened_it(sessions):
    assert sessions.open(5, "s", tenant=b"other") == "s"
    body = {"input_ids": [1], "session_params": {"id": "s", "rid": "a"}}
    with pytest.raises(RequestError, match="no finished turn"):
        begin(sessions, body, tenant=b"other")


def test_an_id_is_free_again_once_its_session_is_closed(sessions):
    with pytest.raises(RequestError, match="open already"):
        sessions.open(5, "s")
    assert sessions.close("s") and not sessions.close("s")
    assert sessions.open(5, "s") == "s"


def test_a_session_that_is_not_used_ends():
    clock = VirtualClock()
    sessions = Sessions(clock)
    sessions.open(9, "s", timeout_s=10)
    clock.advance_to(9)
    turn(sessions, [1], [], "a")
    clock.advance_to(18)
    turn(sessions, [1], [], "b")
    clock.advance_to(29)
    with pytest.raises(RequestError, match="not open"):
        turn(sessions, [1], [], "c")


def test_a_session_that_nobody_uses_is_forgotten_also_when_no_time_was_given():
    clock = VirtualClock()
    found = Sessions(clock)
    found.open(100, "s")
    turn(found, [1], [2], "a")
    clock.advance_to(MAX_IDLE_S)
    assert turn(found, [3], [4], "b", rid="a") == [1, 2, 3]
    clock.advance_to(2 * MAX_IDLE_S + 1)
    with pytest.raises(RequestError, match="not open"):
        turn(found, [3], [4], "c", rid="a")


def test_beyond_the_bytes_the_tenant_that_keeps_most_loses_its_oldest_session():
    clock = VirtualClock()
    found = Sessions(clock, max_bytes=480)

    def play(tenant: bytes, name: str, num_tokens: int) -> None:
        found.open(1000, name, tenant=tenant)
        params = {"id": name}
        body = {"input_ids": [7] * num_tokens, "rid": "a", "session_params": params}
        begun = begin(found, body, tenant)
        clock.advance_to(clock.now() + 1)
        begun.keep([])

    play(b"quiet", "q", 10)
    for name in "xyz":
        play(b"loud", name, 40)
    still = [(tenant, name) for tenant, name in found._open]
    assert still == [(b"quiet", "q"), (b"loud", "y"), (b"loud", "z")]


def test_a_session_opens_for_its_own_tenant_only():
    found = Sessions(VirtualClock())
    found.open(100, "s", tenant=b"alice")
    body = {"input_ids": [1], "session_params": {"id": "s"}}
    assert begin(found, body, b"alice") is not None
    with pytest.raises(RequestError, match="not open"):
        begin(found, body, b"bob")
    assert not found.close("s", b"bob") and found.close("s", b"alice")
