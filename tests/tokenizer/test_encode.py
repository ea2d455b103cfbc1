"""Texts become the same ids in whatever company and process they are tokenized."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import psutil
import pytest

from banyan.base.errors import ModelError, RequestError
from banyan.tokenizer import encode_processes, load
from banyan.tokenizer.encode import BATCHED_CHARS, BatchingEncoder, EncodeKind
from banyan.tokenizer.encode_processes import EncodeProcesses
from banyan.tokenizer.load import load_tokenizer, open_tokenizer
from banyan.tokenizer.tokenizer import Tokenizer
from tests.support.flags import config_of
from tests.support.tokenizer_oracles import FOLDERS, demo_gguf, folder
from tests.system.serving import wait_until

WAIT_S = 60.0
TEXTS = ("Hello", " two words", "", "日本語 😀", "<|im_start|>user\n", "x" * 9000, "\n\n  a")
LONG = "many words and " * 300_000
GATHER = "--enable-dynamic-batch-tokenizer"
SIZE = "--dynamic-batch-tokenizer-batch-size"
WAIT = "--dynamic-batch-tokenizer-batch-timeout"


class Counting:
    """A tokenizer's encoder, whose calls are counted."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._inner = tokenizer.encoder
        self.calls: list[int] = []

    def ids(self, texts: Sequence[str], kind: EncodeKind) -> list[list[int]]:
        self.calls.append(len(texts))
        return self._inner.ids(texts, kind)

    def close(self) -> None:
        self._inner.close()


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return load_tokenizer(demo_gguf())


def opened(*flags: str) -> tuple[Tokenizer, Counting]:
    """The tokenizer of a server with these flags, and the calls of the library that it makes."""
    found: list[Counting] = []

    def counted(path: str, is_slow: bool) -> Tokenizer:
        tokenizer = load_tokenizer(path, is_slow)
        tokenizer.encoder = Counting(tokenizer)
        found.append(tokenizer.encoder)
        return tokenizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "load_tokenizer", counted)
        tokenizer = open_tokenizer(demo_gguf(), config_of(*flags).server)
    return tokenizer, found[0]


def encoded_at_once(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Each text by a thread of its own."""
    start = threading.Barrier(len(texts))

    def encode(text: str) -> list[int]:
        start.wait(WAIT_S)
        return tokenizer.encode(text)

    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(encode, texts))


def test_texts_of_several_requests_go_in_one_call(plain: Tokenizer) -> None:
    tokenizer, counting = opened(GATHER, SIZE, "8", WAIT, "20")
    texts = [f"text number {i}" for i in range(8)]
    assert encoded_at_once(tokenizer, texts) == [plain.encode(text) for text in texts]
    assert counting.calls == [8]


def test_a_call_has_no_more_texts_than_asked_for(plain: Tokenizer) -> None:
    tokenizer, counting = opened(GATHER, SIZE, "2", WAIT, "20")
    texts = [f"text number {i}" for i in range(8)]
    assert encoded_at_once(tokenizer, texts) == [plain.encode(text) for text in texts]
    assert counting.calls == [2] * 4


def test_a_text_waits_for_others_as_long_as_asked_for(plain: Tokenizer) -> None:
    tokenizer, counting = opened(GATHER, WAIT, "0.5")
    assert isinstance(tokenizer.encoder, BatchingEncoder)
    is_full = threading.Event()
    waited: list[float | None] = []

    class Watched(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            return is_full.wait(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("banyan.tokenizer.encode.threading.Event", Watched)
        assert tokenizer.encode("alone") == plain.encode("alone")
    assert waited[0] == 0.5 and counting.calls == [1], "nobody came"


def test_a_text_that_is_none_fails_alone(plain: Tokenizer) -> None:
    tokenizer, counting = opened(GATHER, SIZE, "3", WAIT, "20")
    failures: list[RequestError] = []
    found: list[list[int]] = []

    def encode(text: str) -> None:
        try:
            found.append(tokenizer.encode(text))
        except RequestError as error:
            failures.append(error)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(encode, ("good", "\ud800", "good")))
    assert found == [plain.encode("good")] * 2 and len(failures) == 1
    assert "not valid Unicode" in failures[0].text and counting.calls[0] == 3


def test_long_texts_and_pairs_wait_for_nobody(plain: Tokenizer) -> None:
    tokenizer, counting = opened(GATHER, WAIT, "1000")
    long = "a " * BATCHED_CHARS
    assert tokenizer.encode(long) == plain.encode(long)
    assert tokenizer.encode_pair("a", "b") == plain.encode_pair("a", "b")
    assert counting.calls == [1, 2]


def test_the_pieces_of_a_conversation_go_in_one_call(plain: Tokenizer) -> None:
    tokenizer, counting = opened(GATHER, WAIT, "0")
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_guarded(text, [16]) == plain.encode_guarded(text, [16])
    assert counting.calls == [3]


# -- processes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder() -> Iterator[EncodeProcesses]:
    made = EncodeProcesses(demo_gguf(), 2)
    yield made
    made.close()


@pytest.mark.parametrize("name", ["demo", *FOLDERS])
def test_processes_give_the_same_ids(name: str) -> None:
    path = demo_gguf() if name == "demo" else folder(name)
    tokenizer = load_tokenizer(path)
    made = EncodeProcesses(path, 1)
    try:
        other = tokenizer.through(made)
        assert other.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
        for text in TEXTS:
            assert other.encode(text) == tokenizer.encode(text)
            assert other.encode(text, parse_special=False) == tokenizer.encode(
                text, parse_special=False
            )
            guards = list(range(1, len(text), 3))
            assert other.encode_guarded(text, guards) == tokenizer.encode_guarded(text, guards)
        assert other.encode_pair("a", "b") == tokenizer.encode_pair("a", "b")
    finally:
        made.close()


def test_texts_go_to_several_processes_and_one_that_is_stuck_holds_up_no_other() -> None:
    known = set(psutil.Process().children())
    made = EncodeProcesses(demo_gguf(), 2)
    stuck, _ = set(psutil.Process().children()) - known
    stuck.suspend()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(made.ids, ["a"], EncodeKind.PARSED) for _ in range(2)]
        done, waiting = wait(both, WAIT_S, FIRST_COMPLETED)
        assert len(done) == len(waiting) == 1
        for _ in range(10):
            assert made.ids(["a"], EncodeKind.PARSED) == done.copy().pop().result()
        assert not any(one.done() for one in waiting)
        stuck.resume()
        assert waiting.pop().result(WAIT_S)
    made.close()


def test_a_process_that_ends_fails_its_own_texts_and_is_replaced(plain: Tokenizer) -> None:
    known = set(psutil.Process().children())
    made = EncodeProcesses(demo_gguf(), 1)
    (first,) = set(psutil.Process().children()) - known
    assert made.ids(["a"], EncodeKind.PARSED) == [plain.encode("a", False)]
    begun_s = first.cpu_times().user
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(made.ids, [LONG], EncodeKind.PARSED)
        wait_until(lambda: first.cpu_times().user > begun_s, WAIT_S, "it to work on the text")
        first.kill()
        with pytest.raises(RequestError, match="has ended") as caught:
            failing.result(WAIT_S)
    assert caught.value.status == 500
    assert made.ids(["a"], EncodeKind.PARSED) == [plain.encode("a", False)]
    (second,) = set(psutil.Process().children()) - known
    second.kill()
    wait_until(made._idle.queue[0].has_ended, WAIT_S, "its end")
    assert made.ids(["a"], EncodeKind.PARSED) == [plain.encode("a", False)], "it had no text"
    made.close()
    assert set(psutil.Process().children()) == known, "all have ended"


def test_a_text_that_takes_too_long_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made = EncodeProcesses(demo_gguf(), 1)
    monkeypatch.setattr(encode_processes, "TIME_S", 0.01)
    with pytest.raises(RequestError, match="has ended"):
        made.ids([LONG], EncodeKind.PARSED)
    monkeypatch.undo()
    assert made.ids(["a"], EncodeKind.PARSED)
    made.close()


def test_bad_texts_and_bad_tokenizers_are_reported(
    encoder: EncodeProcesses, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        encoder.ids(["\ud800"], EncodeKind.PARSED)
    assert encoder.ids(["a"], EncodeKind.PARSED), "the process goes on"
    with pytest.raises(ModelError, match="a tokenizer process ended"):
        EncodeProcesses(str(tmp_path), 1)
