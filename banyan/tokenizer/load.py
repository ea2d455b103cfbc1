"""Load a model's tokenizer from a folder or a GGUF file, try it, and choose where it encodes."""

from banyan.base.errors import ModelError, RequestError
from banyan.base.log import printable
from banyan.config.schema import ServerConfig
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
    tokenizer = load_tokenizer(path)
    if server.tokenizer_workers > 1:
        tokenizer = tokenizer.through(EncodeProcesses(path, server.tokenizer_workers))
    if server.gathers_texts:
        most, wait_s = server.gathered_texts, server.gathering_s
        tokenizer = tokenizer.through(BatchingEncoder(tokenizer.encoder, most, wait_s))
    return tokenizer


def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer of a model folder or of a .gguf file.

    Raises:
        ModelError: missing, too large, unreadable, or its pattern backtracks without end.
    """
    load = load_gguf_tokenizer if path.endswith(".gguf") else load_folder_tokenizer
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
