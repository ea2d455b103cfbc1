"""What goes to the front at once and what is held for a moment."""

from array import array

from banyan.base.ids import RequestId
from banyan.engine.outbox import HOLD_S, EventOutbox
from banyan.messages.events import Event, Failed, Finished, Stats, Tokens
from banyan.messages.plan import RowScores
from banyan.messages.requests import Generate
from banyan.messages.sampling_params import SamplingParams

A, B = RequestId("a"), RequestId("b")
LATER_S = 10.0 + 2 * HOLD_S


def outbox(*patient: RequestId, streamed: tuple[RequestId, ...] = ()) -> EventOutbox:
    made = EventOutbox()
    for request in patient:
        made.expect(
            Generate(request=request, tokens=b"", sampling=SamplingParams(max_new_tokens=9))
        )
    for request in streamed:
        made.expect(
            Generate(
                request=request,
                tokens=b"",
                sampling=SamplingParams(max_new_tokens=9),
                stream_interval=1,
            )
        )
    return made


def tokens(request: RequestId, first: int, ids: bytes) -> Tokens:
    return Tokens(request, first, ids)


def test_tokens_that_nobody_reads_before_the_end_are_sent_as_one_event_after_a_moment():
    held = outbox(A)
    assert held.filter([tokens(A, 0, b"0")], 10.0) == [tokens(A, 0, b"0")]
    for i in range(1, 5):
        assert held.filter([tokens(A, i, b"%d" % i)], 10.0) == []
    assert held.filter([], LATER_S) == [tokens(A, 1, b"1234")]
    assert held.filter([], LATER_S + 1) == []


def test_an_end_comes_behind_all_tokens_and_what_follows_is_held_no_more():
    held = outbox(A, B)
    held.filter([tokens(A, 1, b"1"), tokens(B, 1, b"1")], 10.0)
    ends: list[Event] = [Finished(A, "stop", 1, 3, 0), Failed(B, 500, "", "")]
    sent = held.filter([tokens(A, 2, b"2"), *ends, Stats()], 10.0)
    assert sent == [tokens(A, 1, b"12"), ends[0], tokens(B, 1, b"1"), ends[1], Stats()]
    assert held.filter([tokens(A, 3, b"3")], 10.0) == [tokens(A, 3, b"3")]


def test_the_order_of_one_request_holds_where_the_first_tokens_come_as_the_moment_ends():
    held = outbox(A, B)
    held.filter([tokens(B, 1, b"1")], 10.0)
    sent = held.filter([tokens(A, 0, b"0"), tokens(A, 1, b"1")], LATER_S)
    assert [event.first for event in sent if isinstance(event, Tokens) and event.request == A] == [
        0,
        1,
    ]


def test_streams_and_scores_are_never_held():
    held = outbox(A, streamed=(B,))
    assert held.filter([tokens(B, 1, b"1")], 10.0) == [tokens(B, 1, b"1")]
    scored = Tokens(A, 2, b"2", [RowScores(-1, 2, b"")])
    held.filter([tokens(A, 1, b"1")], 10.0)
    assert held.filter([scored], 10.0) == [tokens(A, 1, b"1"), scored]


def ids(request: RequestId, first: int, *tokens: int, **more) -> Tokens:
    return Tokens(request, first, array("i", tokens).tobytes(), **more)


def test_what_was_reported_while_its_plan_ran_is_not_sent_again():
    made = outbox(streamed=(A,))
    assert made.early([ids(A, 3, 7)]) == [ids(A, 3, 7)]
    assert made.early([ids(A, 3, 7, 8, 9)]) == [ids(A, 4, 8, 9)]
    assert made.early([ids(A, 3, 7, 8, 9)]) == []
    assert made.is_early(A)
    decided = [ids(A, 3, 7, 8, 9, 10), Finished(A, "length", 1, 7, 0)]
    assert made.filter(decided, 10.0) == [ids(A, 6, 10), decided[1]]
    assert not made.is_early(A)


def test_what_a_failed_plan_reported_is_left_out_of_what_is_computed_again():
    made = outbox(streamed=(A,))
    made.early([ids(A, 3, 7, 8)])
    assert made.filter([ids(A, 3, 7)], 10.0) == []
    assert made.is_early(A), "8 has been sent and is not decided"
    assert made.filter([ids(A, 4, 8)], 10.0) == []
    assert made.filter([ids(A, 5, 9)], 10.0) == [ids(A, 5, 9)]
