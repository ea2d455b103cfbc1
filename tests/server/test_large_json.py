"""Large JSON bodies are parsed in steps, with the same values and refusals as small ones."""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from banyan.base.errors import RequestError
from banyan.server.http import exchange, limits
from banyan.server.http.limits import MAX_KEYS, MAX_TEXTS, strict_json
from tests.server.fakes import Site

Parse = Callable[[bytes], object]


PARTED = {"QUICK_BYTES": -1, "LONG_TEXT": 2}
"""Texts of more than two bytes count as long."""


@pytest.fixture(params=[{"QUICK_VALUES": -1}, PARTED], ids=["stepped", "parted"])
def stepped(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Parse:
    def parse(body: bytes) -> object:
        with monkeypatch.context() as patch:
            for name, value in request.param.items():
                patch.setattr(limits, name, value)
            return strict_json(body)

    return parse


def made(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return rng.choice([0, -1, 10**14, -(10**15), 10**40, rng.randrange(-99, 99)])
    if kind == 1:
        return rng.choice([0.0, -0.0, 1.5, -2.5e-7, 1e300, rng.random()])
    if kind == 2:
        return rng.choice([None, True, False])
    if kind < 6:
        return "".join(
            rng.choice('ab,"\\\n\x7f\u4f60\U0001f600:[{}]') for _ in range(rng.randrange(9))
        )
    if kind == 6:
        return {f"k{rng.randrange(99)},": made(rng, depth + 1) for _ in range(rng.randrange(5))}
    if kind == 7:
        return [rng.randrange(-9, 1 << 20) for _ in range(rng.randrange(6000))]
    return [made(rng, depth + 1) for _ in range(rng.randrange(5))]


@pytest.mark.parametrize("seed", range(60))
def test_the_values_are_the_same(stepped: Parse, seed: int) -> None:
    rng = random.Random(seed)
    separators = rng.choice([(",", ":"), (", ", ": "), (" ,\n ", " :\t")])
    value = [made(rng) for _ in range(5)]
    body = json.dumps(value, separators=separators, ensure_ascii=rng.random() < 0.5).encode()
    assert repr(stepped(body)) == repr(strict_json(body)) == repr(value)


REFUSED = [
    *(
        b"",
        b"{",
        b"[1,2",
        b"[1,2,]",
        b"[1,,2]",
        b"[,1]",
        b"[01]",
        b"[1.]",
        b"[.5]",
        b"[+1]",
        b"[1]x",
    ),
    *(b'{"long key":1,"long key":2}', b'["long\x1f"]', b'["long\xff"]', b'"long" "long"'),
    *(
        b'{"long key" "long"}',
        b'["long", "lon\\"]',
        b'["lo\\"ng\x01"]',
        b'"long\\',
        b'["\\\\"long"]',
    ),
    *(b"NaN", b"[1,NaN]", b"[Infinity]", b"[-Infinity,1]", b"[1e999]", b"[1,1e999,2]", b"[-]"),
    *(b'{"a":1,"a":2}', b'{"a":1,}', b'{"a" 1}', b"{a:1}", b"['a']", b'"\x01"', b'"\\x"', b'"'),
    *(b'"\\ud800"', b'{"\\udfff":1}', b'["\xff"]', b"\xef\xbb\xbf{}", b"[" * 2000 + b"]" * 2000),
    *(b"[1" + b"0" * 5000 + b"]", b"[1,1" + b"0" * 5000 + b"]", b"tru", b"[1 2]", b"\x00"),
]


@pytest.mark.parametrize("body", REFUSED)
def test_the_refusals_are_the_same(stepped: Parse, body: bytes) -> None:
    for parse in (strict_json, stepped):
        with pytest.raises(RequestError) as caught:
            parse(body)
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_bit_of_damage_is_refused_by_both_or_by_none(stepped: Parse) -> None:
    rng = random.Random(5)
    body = b'{"a": [1, 2.5, -3e2, "x\\n\\u4f60"], "longer": "text", '
    body += b'"b": {"c": null, "d": [[], {}]}, "e": -0.0}'
    for _ in range(3000):
        damaged = bytearray(body)
        for _ in range(rng.randrange(1, 3)):
            damaged[rng.randrange(len(body))] = rng.choice(b'{}[]",:0123456789.eE+-\\ntu \xff')
        found: list[object] = []
        for parse in (strict_json, stepped):
            try:
                found.append(parse(bytes(damaged)))
            except RequestError as error:
                found.append(error.code)
        assert repr(found[0]) == repr(found[1]), bytes(damaged)


def test_the_parser_in_c_gets_small_pieces_only(
    stepped: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []
    loads = limits.orjson.loads

    def noted(text: str) -> object:
        pieces.append(text.count(","))
        return loads(text)

    monkeypatch.setattr("banyan.server.http.limits.orjson.loads", noted)
    ids = list(range(300_000))
    assert stepped(json.dumps({"input_ids": ids}).encode()) == {"input_ids": ids}
    assert max(pieces) <= 2048 and len(pieces) > 100


def keys(count: int) -> bytes:
    return json.dumps({"logit_bias": {f"k{i}": 1 for i in range(count)}}).encode()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (keys(MAX_KEYS + 1), f"{MAX_KEYS + 1} keys"),
        (keys(MAX_TEXTS + 2), f"more than {MAX_TEXTS} strings and keys"),
        (json.dumps(["a"] * (MAX_TEXTS + 2), indent=1).encode(), "strings and keys"),
        (b"[" + b"{}," * limits.MAX_CONTAINERS + b"{}]", "lists and objects"),
        (b'"' + rb"\n" * (limits.MAX_ESCAPES + 1) + b'"', "escapes"),
        (b"[" + b"1," * (limits.MAX_VALUES + 1) + b"1]", "values"),
        (b"[" + b" " * (4 << 20) + b"1]", "white space in a run"),
        (b"[1" + b"\n" * (4 << 20) + b",2]", "white space in a run"),
        (b'{"a":1' + b"0" * (5 << 20) + b"}", "a number has more than 4300"),
        (b"[1." + b"1" * (5 << 20) + b"]", "a number has more than 4300"),
    ],
)
def test_bodies_that_take_long_are_refused_by_their_shape(body: bytes, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        strict_json(body)


def test_a_long_text_is_whole(stepped: Parse) -> None:
    for text in ("x" * 3_000_001, "\u4f60" * (1 << 20) + '\n"' + "y" * (1 << 20), "z" * (1 << 20)):
        assert stepped(json.dumps({"text": text}, ensure_ascii=False).encode()) == {"text": text}


def test_a_file_in_base64_does_not_go_through_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    decode = limits._decoded

    def noted(body: bytes) -> str:
        parsed.append(len(body))
        return decode(body)

    monkeypatch.setattr(limits, "_decoded", noted)
    files = ["QUJD" * (1 << 20), "data:image/png;base64," + "+/==" * (1 << 18), "\u4f60" * 70_000]
    value = {"a": [{"url": files[0]}, "short"], files[1]: {"b": files[2], "c": files[0]}}
    assert strict_json(json.dumps(value, ensure_ascii=False).encode()) == value
    assert parsed and parsed[0] < 1000


def test_large_bodies_are_parsed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, most = 0, 0
    parse = exchange.json_object

    def noted(body: bytes, media: str) -> object:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        found = parse(body, media)
        at_once -= 1
        return found

    monkeypatch.setattr(exchange, "json_object", noted)
    monkeypatch.setattr(exchange, "QUICK_BYTES", 1 << 20)
    body = {"text": "x" * (2 << 20)}
    with Site().serving() as site, ThreadPoolExecutor(6) as threads:
        post = httpx.post
        sent = [threads.submit(post, f"{site.url}/generate", json=body) for _ in range(12)]
        assert {answer.result().status_code for answer in sent} == {400}  # longer than the context
        assert httpx.post(f"{site.url}/generate", json={"text": "a"}).status_code == 200
    assert most == 1


class Counted(bytes):
    """Bytes that note how many of them one call goes through."""

    spans: list[int]

    def count(self, mark: bytes, begin: int = 0, end: int | None = None) -> int:
        stop = len(self) if end is None else min(end, len(self))
        self.spans.append(stop - begin)
        return super().count(mark, begin, stop)


def test_marks_are_counted_in_pieces() -> None:
    text = "\n" + "[" * 100 + "x" * (5 << 20)
    body = Counted(json.dumps({"text": text, "n": [1, 2]}).encode())
    body.spans = []
    assert limits.json_object(body) == json.loads(bytes(body))
    assert max(body.spans) <= 1 << 20 and len(body.spans) > 30
    assert limits.count_of(body, b"[", b",") == bytes(body).count(b"[") + bytes(body).count(b",")
