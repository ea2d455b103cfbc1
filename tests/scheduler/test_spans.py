"""Contents in the scheduler: pieces next to decode rows, room, and what prefixes may end in."""

from array import array
from collections import Counter
from hashlib import sha256

import msgspec
import pytest

from banyan.messages.plan import PieceFailure
from banyan.messages.requests import Abort, Generate
from banyan.messages.sampling_params import SamplingParams
from banyan.messages.spans import Content, ContentKind, Span, ids_with_spans
from banyan.scheduler.spans import ContentLimits, TowerWork, last_end
from tests.scheduler.driver import Driver

LIMITS = ContentLimits(pool_rows=20, towers=(TowerWork(ContentKind.PATCHES, 6, patch_work=1),))


def request(name: str, text: int, rows: int, content: str, new: int = 2) -> Generate:
    """A prompt of `text` tokens, a content, and two tokens more; a block costs `rows` tokens."""
    digest = sha256(content.encode()).digest()
    span = Span(text, rows, digest, kind=ContentKind.PATCHES)
    tokens = array("i", [1] * (text + rows + 2)).tobytes()
    return Generate(
        request=name,
        tokens=ids_with_spans(tokens, [span]),
        sampling=SamplingParams(max_new_tokens=new),
        spans=(span,),
        contents=(Content(digest, ContentKind.PATCHES, b"", (1, 1, rows), rows),),
    )


def blocks_of(driver: Driver) -> list[list[int]]:
    return [[piece.blocks for piece in plan.pieces] for plan in driver.plans]


def test_decode_rows_go_on_next_to_every_piece_and_text_comes_first():
    driver = Driver(chunk_tokens=16, content=LIMITS)
    driver.submit("text", [5], new=12)
    driver.step()
    driver.receive(request("content", text=3, rows=8, content="a"))
    driver.run()
    assert not driver.core.scheduler.request_table.running
    first, *others = [plan for plan in driver.plans if plan.pieces]
    assert [row.count for row in first.rows] == [1, 3], "one token, and the text before the span"
    assert all(any(row.slot == 1 for row in plan.rows) for plan in (first, *others))
    assert blocks_of(driver)[1:5] == [[1], [2], [2], [1]]
    assert others[-1].rows[-1].start == 3, "the span runs in the plan of the last piece"


def test_a_piece_is_one_block_at_least():
    driver = Driver(chunk_tokens=4, content=LIMITS)
    driver.receive(request("a", text=1, rows=18, content="a"))
    driver.run()
    assert [blocks for blocks in blocks_of(driver) if blocks] == [[1]] * 6


def test_two_requests_with_one_content_make_it_once_and_a_third_finds_it():
    driver = Driver(chunk_tokens=64, content=LIMITS)
    for name, text in (("a", 2), ("b", 5)):
        driver.receive(request(name, text, rows=8, content="same"))
    driver.run()
    driver.receive(request("c", text=1, rows=8, content="same"))
    driver.run()
    assert sum(len(plan.contents) for plan in driver.plans) == 1
    assert sum(map(sum, blocks_of(driver))) == 6


def test_features_that_nobody_needs_make_room_the_oldest_first():
    driver = Driver(chunk_tokens=1000, content=LIMITS)
    for content in "abc":
        driver.receive(request(content, text=1, rows=8, content=content))
        driver.run()
    assert [plan.forget for plan in driver.plans if plan.forget] == [[1]]
    driver.receive(request("b again", text=2, rows=8, content="b"))
    driver.run()
    assert sum(len(plan.contents) for plan in driver.plans) == 3


def test_a_content_that_fails_ends_its_requests_and_is_made_again_for_others():
    driver = Driver(chunk_tokens=64, content=LIMITS)
    driver.receive(request("bad", text=2, rows=8, content="a"))
    driver.submit("text", [5, 6], new=3)
    plan = driver.launch()
    assert plan is not None and plan.pieces
    result = driver._execute(driver.flying.popleft())
    spoilt = [PieceFailure(plan.pieces[0].content, "torn", 400)]
    events, _ = driver.core.complete(msgspec.structs.replace(result, spoilt=spoilt), 0.0)
    driver._hear(events)
    assert (driver.ends["bad"].status, driver.ends["bad"].text) == (400, "The request failed: torn")
    driver.receive(request("good", text=2, rows=8, content="a"))
    driver.run()
    assert driver.ends["good"].reason == driver.ends["text"].reason == "length"
    assert sum(len(plan.contents) for plan in driver.plans) == 2


def test_work_for_an_aborted_request_stops():
    driver = Driver(chunk_tokens=8, content=LIMITS)
    driver.receive(request("a", text=1, rows=8, content="a"))
    driver.step()
    driver.receive(Abort("a"))
    driver.submit("text", [5], new=1)
    driver.run()
    assert not driver.plans[-1].pieces and driver.plans[-1].forget == [1]
    assert driver.core.scheduler.contents.take_dropped() == [sha256(b"a").digest()]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"spans": ()}, "negative ids outside"),
        ({"contents": ()}, "did not come"),
        ({"tokens": bytes(4 * 40)}, "are not the ids of the content"),
    ],
)
def test_spans_that_do_not_fit_the_prompt_are_refused(changes, text):
    driver = Driver(content=LIMITS)
    driver.receive(msgspec.structs.replace(request("a", 2, 8, "a"), **changes))
    assert text in driver.ends["a"].text and driver.ends["a"].status == 400


def test_a_content_larger_than_the_pool_is_refused():
    driver = Driver(content=LIMITS)
    driver.receive(request("a", 2, 21, "a"))
    assert driver.ends["a"].code == "content_too_large"


@pytest.mark.parametrize(
    ("end", "is_mutual", "expected"),
    [(3, False, 3), (4, False, 3), (6, False, 3), (7, False, 7), (30, False, 30), (9, True, 3)],
)
def test_a_prefix_ends_where_its_ids_identify_the_content(end, is_mutual, expected):
    span = Span(3, 10, bytes(32), is_mutual=is_mutual)
    assert last_end([span], end) == expected


def test_a_span_of_few_places_is_never_part_of_a_prefix():
    assert last_end([Span(3, 2, bytes(32))], 20) == 3


def test_pieces_are_charged_to_their_caller():
    driver = Driver(chunk_tokens=64, content=LIMITS, max_running=1)
    for at in range(30):
        content = request(f"content-{at}", 2, rows=8, content=f"{at}", new=1)
        driver.receive(msgspec.structs.replace(content, caller=b"content"))
        driver.submit(f"text-{at}", [at + 1] * 12, new=1, caller=b"text")
    while len(driver.ends) < 24:
        driver.step()
    served = Counter(name.partition("-")[0] for name in list(driver.ends)[:24])
    assert served["text"] > 3 * served["content"], "six blocks cost 48 tokens, a prompt 12"
