"""Encoders: lists of texts → token ids.

`LibraryEncoder` encodes in the calling thread, `BatchingEncoder` joins texts of several requests
into one call, `EncodeProcesses` (encode_processes.py) uses worker processes. All are thread-safe
and return the same ids.
"""

import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import tokenizers

from banyan.base.errors import RequestError
from banyan.base.log import printable

BATCHED_CHARS = 8 << 10
"""Longer texts gain nothing from batching and would delay the batch."""


class EncodeKind(IntEnum):
    """How a text is encoded."""

    PARSED = 0
    """Texts of added tokens become their ids."""
    PLAIN = 1
    """Everything is plain text."""
    PAIR = 2
    """Two texts, joined as the model's own template does, special tokens included."""


class Encoder(Protocol):
    def ids(self, texts: Sequence[str], kind: EncodeKind) -> list[list[int]]:
        """Encode each text; for PAIR, both texts together. Only PAIR adds special tokens.

        Raises:
            RequestError: one is not valid Unicode, or the tokenizer's pattern gives up on it.
        """
        ...

    def close(self) -> None: ...


class LibraryEncoder:
    """The `tokenizers` library itself."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        bare = _without_added_tokens(backend)
        self._backends = {
            EncodeKind.PARSED: backend,
            EncodeKind.PLAIN: bare,
            EncodeKind.PAIR: backend,
        }

    def ids(self, texts: Sequence[str], kind: EncodeKind) -> list[list[int]]:
        """Encode as a batch even for one text: only the batch call releases the interpreter
        lock."""
        inputs = [tuple(texts)] if kind is EncodeKind.PAIR else list(texts)
        try:
            found = self._backends[kind].encode_batch_fast(
                inputs, add_special_tokens=kind is EncodeKind.PAIR
            )
            return [encoding.ids for encoding in found]
        except BaseException as error:
            raise _encode_error(error) from None

    def close(self) -> None:
        """Nothing to release."""


class BatchingEncoder:
    """Encodes texts of requests that arrive at about the same time in one call to `encoder`.

    Args:
        most: texts per call, unless a single request has more.
        wait_s: seconds that the first text waits for others.
    """

    def __init__(self, encoder: Encoder, most: int, wait_s: float) -> None:
        self._encoder = encoder
        self._most = most
        self._wait_s = wait_s
        self._open: dict[EncodeKind, _TextBatch] = {}
        self._lock = threading.Lock()

    def ids(self, texts: Sequence[str], kind: EncodeKind) -> list[list[int]]:
        if kind is EncodeKind.PAIR or sum(map(len, texts)) > BATCHED_CHARS:
            return self._encoder.ids(texts, kind)
        with self._lock:
            batch = self._open.get(kind)
            is_first = batch is None
            if batch is None:
                batch = self._open[kind] = _TextBatch()
            own = batch.add(texts)
            if len(batch.texts) >= self._most:
                self._seal(batch, kind)
        if is_first:
            batch.is_full.wait(self._wait_s)
            with self._lock:
                self._seal(batch, kind)
            batch.run(self._encoder, kind)
        batch.is_done.wait()
        if batch.found is None:  # one text of the batch is invalid; encode our own alone
            return self._encoder.ids(texts, kind)
        return batch.found[own]

    def close(self) -> None:
        self._encoder.close()

    def _seal(self, batch: "_TextBatch", kind: EncodeKind) -> None:
        """Close the batch to further texts. Called under the lock."""
        batch.is_full.set()
        if self._open.get(kind) is batch:
            del self._open[kind]


class _TextBatch:
    """One batch. The thread that added the first text encodes all of them."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.is_full, self.is_done = threading.Event(), threading.Event()
        self.found: list[list[int]] | None = None

    def add(self, texts: Sequence[str]) -> slice:
        self.texts += texts
        return slice(len(self.texts) - len(texts), len(self.texts))

    def run(self, encoder: Encoder, kind: EncodeKind) -> None:
        try:
            self.found = encoder.ids(self.texts, kind)
        except RequestError:
            self.found = None
        finally:
            self.is_done.set()


def is_library_error(error: BaseException) -> bool:
    """Whether the library failed: its panics are BaseExceptions of a class it does not export."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def not_unicode() -> RequestError:
    return RequestError("the text is not valid Unicode (it has unpaired surrogates)")


def _encode_error(error: BaseException) -> BaseException:
    if isinstance(error, RequestError) or not is_library_error(error):
        return error
    if isinstance(error, (UnicodeError, TypeError)):
        return not_unicode()
    return RequestError(f"the text cannot be tokenized: {printable(str(error))}")


def _without_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same vocabulary, shared, where every text is plain text."""
    bare = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        bare.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        bare.pre_tokenizer = backend.pre_tokenizer
    return bare
