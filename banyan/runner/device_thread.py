"""Home: the thread that launches. It stays in inference mode; others enter it at each launch."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_AS_IT_IS: AbstractContextManager[object] = nullcontext()


class Home:
    """A step's weights sweep torch's code out of the caches, so that entering the mode takes some
    sixty microseconds, which a short step would wait for."""

    def __init__(self) -> None:
        self._thread = 0

    @contextmanager
    def stay(self) -> Iterator[None]:
        """The calling thread is at home until this ends."""
        with torch.inference_mode():
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = 0

    def mode(self) -> AbstractContextManager[object]:
        """Inference mode, for the calling thread."""
        is_here = threading.get_ident() == self._thread
        return _AS_IT_IS if is_here else torch.inference_mode()
