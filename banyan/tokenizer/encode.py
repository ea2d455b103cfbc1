"""Encoders: lists of texts to token ids, in this thread (Library) or together with those of other
requests (Gathered). In processes: encode_processes. All may be used from several threads, and
all give the same ids.
"""

import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import tokenizers

from banyan.base.errors import RequestError
from banyan.base.log import printable

GATHERED_CHARS = 8 << 10
"""Longer texts are no faster in company, and would hold it up."""


class Kind(IntEnum):
    """How texts are read."""

    PARSED = 0
    """The texts of added tokens become their ids."""
    PLAIN = 1
    """All of it is plain text."""
    PAIR = 2
    """Two texts, joined as the model's own template does, special tokens included."""


class Encoder(Protocol):
    def ids(self, texts: Sequence[str], kind: Kind) -> list[list[int]]:
        """Ids of each text, of a PAIR of both together. No tokens are put around any but a PAIR.

        Raises:
            RequestError: one is not valid Unicode, or the tokenizer's pattern gives up on it.
        """
        ...

    def close(self) -> None: ...


class Library:
    """The `tokenizers` library itself."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        bare = _without_added_tokens(backend)
        self._backends = {Kind.PARSED: backend, Kind.PLAIN: bare, Kind.PAIR: backend}

    def ids(self, texts: Sequence[str], kind: Kind) -> list[list[int]]:
        """As a batch also where it is one text: only that lets other threads run Python."""
        inputs = [tuple(texts)] if kind is Kind.PAIR else list(texts)
        try:
            found = self._backends[kind].encode_batch_fast(
                inputs, add_special_tokens=kind is Kind.PAIR
            )
            return [encoding.ids for encoding in found]
        except BaseException as error:
            raise _encode_error(error) from None

    def close(self) -> None:
        """Nothing to end."""


class Gathered:
    """Texts of requests that come at about the same time go to `encoder` in one call.

    Args:
        most: texts of one call, if no request alone has more.
        wait_s: how long the first of them waits for others.
    """

    def __init__(self, encoder: Encoder, most: int, wait_s: float) -> None:
        self._encoder = encoder
        self._most = most
        self._wait_s = wait_s
        self._open: dict[Kind, _Company] = {}
        self._lock = threading.Lock()

    def ids(self, texts: Sequence[str], kind: Kind) -> list[list[int]]:
        if kind is Kind.PAIR or sum(map(len, texts)) > GATHERED_CHARS:
            return self._encoder.ids(texts, kind)
        with self._lock:
            company = self._open.get(kind)
            is_first = company is None
            if company is None:
                company = self._open[kind] = _Company()
            own = company.add(texts)
            if len(company.texts) >= self._most:
                self._set_off(company, kind)
        if is_first:
            company.is_full.wait(self._wait_s)
            with self._lock:
                self._set_off(company, kind)
            company.run(self._encoder, kind)
        company.is_done.wait()
        if company.found is None:  # one of the texts is at fault, and others are not
            return self._encoder.ids(texts, kind)
        return company.found[own]

    def close(self) -> None:
        self._encoder.close()

    def _set_off(self, company: "_Company", kind: Kind) -> None:
        """Nobody joins it any more. Called under the lock."""
        company.is_full.set()
        if self._open.get(kind) is company:
            del self._open[kind]


class _Company:
    """Texts that go together. The thread of the first one encodes them all."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.is_full, self.is_done = threading.Event(), threading.Event()
        self.found: list[list[int]] | None = None

    def add(self, texts: Sequence[str]) -> slice:
        self.texts += texts
        return slice(len(self.texts) - len(texts), len(self.texts))

    def run(self, encoder: Encoder, kind: Kind) -> None:
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
