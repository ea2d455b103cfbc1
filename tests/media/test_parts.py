"""Base64 of pictures: decoded in pieces, with the same outcome as in one."""

import base64
import random
import re

import pytest

from banyan.base.errors import RequestError
from banyan.media import parts
from banyan.media.parts import EncodedFile, decoded, source_of


def whole(text: str) -> bytes | None:
    """What the library makes of it at once, when it ends in order; None = it is refused."""
    plain = "".join(text.split()).replace("-", "+").replace("_", "/")
    found = re.fullmatch(r"([A-Za-z0-9+/]*)(=*)", plain)
    last = len(found[1]) % 4 if found else 1
    if found is None or last == 1 or last + len(found[2]) > 4:
        return None
    return base64.b64decode(found[1] + "=" * (-last % 4), validate=True) or None


def in_pieces(text: str) -> bytes | None:
    try:
        return decoded(text, "x")
    except RequestError as error:
        assert (error.status, error.code) == (400, "invalid_image")
        return None


@pytest.mark.parametrize("size", [1, 3, 4, 7, 64])
def test_pieces_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(parts, "PIECE_CHARS", size)
    dice = random.Random(size)
    refused = 0
    for _ in range(2000):
        text = list(base64.b64encode(dice.randbytes(dice.randrange(1, 90))).decode())
        if dice.random() < 0.3:
            text = list("".join(text).rstrip("="))
        for _ in range(dice.choice((0, 0, 1, 3))):
            text.insert(dice.randrange(len(text) + 1), dice.choice(" \n\t-_+/=A%\u00e9"))
        given = "".join(text)
        assert in_pieces(given) == whole(given), given
        refused += whole(given) is None
    assert 200 < refused < 1500


def test_no_call_gets_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(1).randbytes(3_000_001)
    sizes: list[int] = []
    decode = base64.b64decode

    def noted(text: bytes, validate: bool) -> bytes:
        sizes.append(len(text))
        return decode(text, validate=validate)

    class Quick:
        def decode(self, quoted: bytes) -> bytes:
            return noted(quoted[1:-1], validate=True)

    monkeypatch.setattr("banyan.media.parts.base64.b64decode", noted)
    monkeypatch.setattr("banyan.media.parts._QUICK", Quick())
    text = base64.b64encode(data).decode()
    for given in (
        text,
        f"data:image/png;base64,{text}",
        f"data:image/png;base64,{text}" + "\n" * 9,
    ):
        source = source_of(given, "x")
        assert isinstance(source, EncodedFile) and not sizes
        assert source.decoded() == data
        assert max(sizes) <= parts.PIECE_CHARS + 4 and len(sizes) > 10
        sizes.clear()


def test_what_follows_the_end_is_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PIECE_CHARS", 64)
    with pytest.raises(RequestError, match="broken"):
        decoded("QQ==" + "=" * 1_000_000, "x")
