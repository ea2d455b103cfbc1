"""Spans: ids of places, and the checks of what a client's process sends."""

import hashlib

import msgspec
import numpy as np
import pytest

from banyan.messages.spans import Content, ContentKind, Span, check_spans, ids_with_spans, place_ids

DIGEST = hashlib.sha256(b"content").digest()
SPAN = Span(2, 6, DIGEST, shape=(1, 2, 3), kind=ContentKind.PATCHES)
CONTENT = Content(DIGEST, ContentKind.PATCHES, b"", (1, 4, 6), 6)


def prompt(span: Span = SPAN, length: int = 10) -> bytes:
    return ids_with_spans(np.arange(length, dtype=np.int32).tobytes(), [span])


def test_place_ids_are_negative_and_differ_between_contents_and_places() -> None:
    ids = place_ids(DIGEST, 500)
    assert max(ids) < 0 and ids.itemsize == 4 and len(set(ids)) == 500
    other = place_ids(hashlib.sha256(b"other").digest(), 500)
    assert not set(ids) & set(other)


def test_a_later_stretch_of_a_content_has_the_ids_of_its_rows() -> None:
    assert place_ids(DIGEST, 12)[5:].tolist() == place_ids(DIGEST, 7, offset=5).tolist()


def test_spans_that_fit_pass_and_travel() -> None:
    check_spans(prompt(), [SPAN], [CONTENT])
    for part in (SPAN, CONTENT):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=type(part)) == part


@pytest.mark.parametrize(
    ("tokens", "spans", "contents", "text"),
    [
        (prompt()[: 7 * 4], [SPAN], [CONTENT], "is not within"),
        (prompt(), [SPAN, SPAN], [CONTENT], "is not within"),
        (prompt(), [SPAN], [], "did not come"),
        (prompt(), [msgspec.structs.replace(SPAN, offset=1)], [CONTENT], "feature rows 1 … 6"),
        (prompt(), [msgspec.structs.replace(SPAN, shape=(1, 2, 2))], [CONTENT], "shape"),
        (prompt(), [msgspec.structs.replace(SPAN, shape=(-1, -2, 3))], [CONTENT], "shape"),
        (prompt(), [], [], "negative ids outside"),
        (np.arange(10, dtype=np.int32).tobytes(), [SPAN], [CONTENT], "not the ids of the content"),
        (prompt(), [SPAN], [msgspec.structs.replace(CONTENT, digest=b"1")], "no valid digest"),
        (prompt(), [SPAN], [msgspec.structs.replace(CONTENT, rows=0)], "0 feature rows"),
    ],
)
def test_a_span_that_does_not_fit_is_refused(
    tokens: bytes, spans: list[Span], contents: list[Content], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        check_spans(tokens, spans, contents)
