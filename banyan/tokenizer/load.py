"""Load a model's tokenizer from a folder or a GGUF file, try it, and choose where it encodes."""

from functools import partial

from banyan.base.errors import ModelError, RequestError
from banyan.base.log import printable
from banyan.config.schema import SLOW, ServerConfig
from banyan.tokenizer.encode import BatchingEncoder
from banyan.tokenizer.encode_processes import EncodeProcesses
from banyan.tokenizer.folder_tokenizer import load_folder_tokenizer
from banyan.tokenizer.gguf_tokenizer import load_gguf_tokenizer
from banyan.tokenizer.tokenizer import Tokenizer, build_backend

# Runs of one character, long enough for a pattern with exponential backtracking to fail.
_PROBES = tuple(c * 48 + e for c in ("a", "1", " ", "!", "\n", "é") for e in ("", "\x00", "b"))


def open_tokenizer(path: str, server: ServerConfig) -> Tokenizer:
    """The tokenizer for requests. Worker processes end with `encoder.close()` or with this process.

    Raises:
        ModelError: as load_tokenizer.
    """
    is_slow = server.tokenizer_mode == SLOW
    tokenizer = load_tokenizer(path, is_slow)
    if server.tokenizer_workers > 1:
        processes = EncodeProcesses(path, server.tokenizer_workers, is_slow)
        tokenizer = tokenizer.through(processes)
    if server.gathers_texts:
        most, wait_s = server.gathered_texts, server.gathering_s
        tokenizer = tokenizer.through(BatchingEncoder(tokenizer.encoder, most, wait_s))
    return tokenizer


def load_tokenizer(path: str, is_slow: bool = False) -> Tokenizer:
    """Load the tokenizer of a model folder or of a .gguf file.

    Args:
        is_slow: read the vocabulary file from which tokenizer.json was made, not that.

    Raises:
        ModelError: missing, too large, unreadable, or its pattern backtracks without end.
    """
    if is_slow and path.endswith(".gguf"):
        raise ModelError(
            f"--tokenizer-mode slow: {printable(path)!r} holds one form of its vocabulary",
            "leave it out",
        )
    load = load_gguf_tokenizer if path.endswith(".gguf") else load_folder_tokenizer
    if is_slow:
        load = partial(load_folder_tokenizer, is_slow=True)
    tokenizer = build_backend(path, lambda: load(path))
    try:
        for probe in (*_PROBES, *tokenizer.probes):
            tokenizer.encode(probe)
    except RequestError as error:
        raise ModelError(
            f"the tokenizer of {printable(path)!r} fails on a simple text: {error.text}",
            "its pre-tokenizer pattern is broken or hostile; take the tokenizer from its publisher",
        ) from None
    return tokenizer
