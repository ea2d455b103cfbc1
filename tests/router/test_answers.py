"""Reading one answer of a worker, without a socket: every cut, and every limit."""

import h11
import pytest

from banyan.router.upstream import (
    FEED_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_INTERIM,
    MOST_EVENTS,
    BadResponse,
    ResponseHead,
    ResponseReader,
)
from tests.support.cases import check_each

OK = b"HTTP/1.1 200 OK\r\n"
WITH_LENGTH = OK + b"content-length: 5\r\nX-Of: a\r\n\r\nhello"
IN_CHUNKS = OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n"
WITH_TRAILERS = IN_CHUNKS[:-2] + b"checksum: 1\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
WHOLE = {
    "with a length": WITH_LENGTH,
    "in chunks": IN_CHUNKS,
    "with trailers": WITH_TRAILERS,
    "behind 103": HINTS + WITH_LENGTH,
    "behind 100, 102 and 103": CONTINUE + b"HTTP/1.1 102 P\r\n\r\n" + HINTS + IN_CHUNKS,
}


def asked() -> ResponseReader:
    reader = ResponseReader()
    reader.request("GET", b"/x", [(b"host", b"h")], b"")
    return reader


def read(reader: ResponseReader, parts: list[bytes]) -> tuple[ResponseHead | None, bytes]:
    """What a reader makes of an answer that comes in these parts, each no longer than it may be."""
    head, body = None, b""
    for part in parts:
        for at in range(0, max(1, len(part)), FEED_BYTES):
            reader.feed(part[at : at + FEED_BYTES])
            head = head or reader.head()
            while head and not (reader.is_over or reader.is_hungry):
                body += reader.piece()
    return head, body


@pytest.mark.parametrize("answer", WHOLE.values(), ids=WHOLE)
def test_an_answer_is_the_same_wherever_it_is_cut(answer: bytes) -> None:
    for at in range(1, len(answer)):
        reader = asked()
        head, body = read(reader, [answer[:at], answer[at:]])
        assert head is not None and head.status == 200 and body == b"hello"
        assert reader.is_over and reader.is_clean
    reader = asked()
    assert read(reader, [bytes([byte]) for byte in answer])[1] == b"hello" and reader.is_clean


@pytest.mark.parametrize("answer", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("behind", [WITH_LENGTH, HINTS, b"\r\n", b"x"])
def test_a_connection_is_not_clean_with_a_byte_behind_the_answer(
    answer: bytes, behind: bytes
) -> None:
    for size in range(1, len(behind) + 1):
        reader = asked()
        assert read(reader, [answer + behind[:size]])[1] == b"hello"
        assert reader.is_over and not reader.is_clean


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello",
    ],
)
def test_a_connection_is_not_clean_that_the_worker_does_not_keep(answer: bytes) -> None:
    reader = asked()
    assert read(reader, [answer])[1] == b"hello" and not reader.is_clean


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    reader = asked()
    assert read(reader, [OK + b"\r\nhel", b"lo", b""])[1] == b"hello"
    assert reader.is_over and not reader.is_clean


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_that_has_no_body_ends_with_its_head(status: int) -> None:
    reader = asked()
    head, body = read(reader, [b"HTTP/1.1 %d X\r\ncontent-length: 5\r\n\r\nhello" % status])
    assert head is not None and head.status == status and body == b""
    assert reader.is_over and not reader.is_clean


@pytest.mark.parametrize("answer", [WITH_LENGTH, IN_CHUNKS, WITH_TRAILERS])
def test_an_answer_whose_connection_closes_in_its_body_is_refused(answer: bytes) -> None:
    for at in range(answer.index(b"\r\n\r\n") + 4, len(answer)):
        with pytest.raises(BadResponse):
            read(asked(), [answer[:at], b""])


BAD = {
    "no HTTP": b"hello\r\n\r\n",
    "HTTP/2": b"HTTP/2 200 OK\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "a status of 4 digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "a negative status": b"HTTP/1.1 -20 OK\r\n\r\n",
    "101": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "a header without a colon": OK + b"hello\r\n\r\n",
    "a space before the colon": OK + b"content-length : 5\r\n\r\nhello",
    "NUL in a header": OK + b"x: \x00\r\n\r\n",
    "two lengths": OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "two lengths in one": OK + b"content-length: 5, 6\r\n\r\nhello",
    "a negative length": OK + b"content-length: -5\r\n\r\nhello",
    "a length with a sign": OK + b"content-length: +5\r\n\r\nhello",
    "a length in hex": OK + b"content-length: 0x5\r\n\r\nhello",
    "an endless length": OK + b"content-length: " + b"0" * 5000 + b"5\r\n\r\nhello",
    "a length of 5000 digits": OK + b"content-length: " + b"9" * 5000 + b"\r\n\r\nhello",
    "a length and chunks": OK + b"content-length: 5\r\n" + IN_CHUNKS[len(OK) :],
    "another encoding": OK + b"transfer-encoding: gzip\r\n\r\nhello",
    "encodings": OK + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
}
_CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
BAD_CHUNKS = {
    "no size": _CHUNKED + b"\r\nhello\r\n",
    "a size that is no number": _CHUNKED + b"zz\r\nhello\r\n",
    "a negative size": _CHUNKED + b"-5\r\nhello\r\n",
    "a size with a prefix": _CHUNKED + b"0x5\r\nhello\r\n",
    "a size of 30 digits": _CHUNKED + b"F" * 30 + b"\r\nhello\r\n",
    "a chunk longer than its size": _CHUNKED + b"4\r\nhello\r\n0\r\n\r\n",
    "a chunk shorter than its size": _CHUNKED + b"6\r\nhello\r\n0\r\n\r\n",
    "an interim answer in its middle": _CHUNKED + b"2\r\nhe\r\n" + HINTS + b"3\r\nllo\r\n0\r\n\r\n",
    "a trailer that is none": _CHUNKED + b"0\r\nhello\r\n\r\n",
}


@pytest.mark.parametrize("answer", [*BAD.values(), *BAD_CHUNKS.values()], ids=[*BAD, *BAD_CHUNKS])
def test_what_is_no_answer_is_refused_wherever_it_is_cut(answer: bytes) -> None:
    for at in (0, *range(1, min(len(answer), 200))):
        with pytest.raises(BadResponse):
            read(asked(), [answer[:at] or answer, answer[at:] if at else b"", b""])


def test_a_number_that_is_no_status_is_refused() -> None:
    def check(status: int) -> None:
        with pytest.raises(BadResponse):
            read(asked(), [b"HTTP/1.1 %03d X\r\ncontent-length: 0\r\n\r\n" % status])

    check_each([*range(0, 100), *range(600, 1000)], check, str)


ENDLESS = {
    "a header's value": (OK + b"x: ", b"y" * 1000),
    "a header's name": (OK, b"y" * 1000),
    "a folded header": (OK + b"x: y", b"\r\n y"),
    "headers": (OK, b"x: y\r\n"),
    "a reason": (b"HTTP/1.1 200 ", b"y" * 1000),
    "interim answers": (b"", CONTINUE),
    "interim answers with headers": (b"", HINTS),
    "the headers of an interim answer": (b"HTTP/1.1 103 X\r\n", b"x: y\r\n"),
    "trailers": (_CHUNKED + b"0\r\n", b"x: y\r\n"),
    "a trailer": (_CHUNKED + b"0\r\nx: ", b"y" * 1000),
    "a chunk's extension": (_CHUNKED + b"5;", b"y" * 1000),
    "empty lines": (b"", b"\r\n"),
}


@pytest.mark.parametrize(("begins", "goes_on"), ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("size", [1, 1000, FEED_BYTES])
def test_what_has_no_end_is_refused_after_a_bounded_number_of_bytes(
    begins: bytes, goes_on: bytes, size: int
) -> None:
    reader, fed = asked(), 0
    data = begins + goes_on * (2 * (MAX_HEAD_BYTES + FEED_BYTES) // len(goes_on))
    with pytest.raises(BadResponse):
        for at in range(0, len(data), size):
            fed += len(data[at : at + size])
            read_on(reader, data[at : at + size])
    assert fed <= MAX_HEAD_BYTES + 2 * FEED_BYTES


def read_on(reader: ResponseReader, part: bytes) -> None:
    reader.feed(part)
    if not reader.has_head:
        reader.head()
    while reader.has_head and not (reader.is_hungry or reader.is_over):
        reader.piece()


def test_as_many_headers_and_interim_answers_as_may_are_read() -> None:
    lines = b"".join(b"h%d: x\r\n" % at for at in range(MAX_HEADERS - 1))
    whole = OK + lines + b"content-length: 0\r\n\r\n"
    head, _ = read(asked(), [b"HTTP/1.1 100 C\r\n\r\n" * MAX_INTERIM + whole])
    assert head is not None and len(head.headers) == MAX_HEADERS
    with pytest.raises(BadResponse):
        read(asked(), [OK + b"one: more\r\n" + whole[len(OK) :]])
    with pytest.raises(BadResponse):
        read(asked(), [b"HTTP/1.1 100 C\r\n\r\n" * (MAX_INTERIM + 1) + whole])


def test_one_call_parses_a_bounded_number_of_chunks() -> None:
    reader = asked()
    reader.feed(_CHUNKED)
    assert reader.head() is not None
    reader.feed(b"1\r\nx\r\n" * (FEED_BYTES // 6))
    sizes = []
    while not reader.is_hungry:
        sizes.append(len(reader.piece()))
    assert sum(sizes) == FEED_BYTES // 6 and max(sizes) <= MOST_EVENTS


def test_a_request_travels_as_it_is_given() -> None:
    headers = [(b"host", b"h:1"), (b"x-Mine", b"a  b\t\xff"), (b"content-length", b"3")]
    raw = ResponseReader().request("POST", b"/a%2fb?c=%C3%A9&&d", headers, b"\r\n\x00")
    assert b"".join(raw) == (
        b"POST /a%2fb?c=%C3%A9&&d HTTP/1.1\r\nhost: h:1\r\nx-Mine: a  b\t\xff\r\n"
        b"content-length: 3\r\n\r\n\r\n\x00"
    )


@pytest.mark.parametrize("target", [b"/a b", b"/a\r\nx: y", b"/\xc3", b""])
def test_a_request_that_http_cannot_carry_is_not_written(target: bytes) -> None:
    with pytest.raises(h11.LocalProtocolError):
        ResponseReader().request("GET", target, [(b"host", b"h")], b"")
