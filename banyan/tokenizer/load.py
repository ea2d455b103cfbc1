"""Load a model's tokenizer, whatever form it has, and try it before anybody's text reaches it; and
decide where its texts become ids."""

from banyan.base.errors import ModelError, RequestError
from banyan.base.log import printable
from banyan.config.schema import ServerConfig
from banyan.tokenizer.encode import Gathered
from banyan.tokenizer.encode_processes import EncodeProcesses
from banyan.tokenizer.folder_tokenizer import load_folder_tokenizer
from banyan.tokenizer.gguf_tokenizer import load_gguf_tokenizer
from banyan.tokenizer.tokenizer import Tokenizer, build_backend

# Runs of one kind of character, long enough for a pattern with exponential backtracking to give up.
_PROBES = tuple(c * 48 + e for c in ("a", "1", " ", "!", "\n", "é") for e in ("", "\x00", "b"))


def open_tokenizer(path: str, server: ServerConfig) -> Tokenizer:
    """The tokenizer of requests. Its processes, where it has some, end with `close` of its encoder
    or with this process.

    Raises:
        ModelError: as load_tokenizer.
    """
    tokenizer = load_tokenizer(path)
    if server.tokenizer_workers > 1:
        tokenizer = tokenizer.through(EncodeProcesses(path, server.tokenizer_workers))
    if server.gathers_texts:
        most, wait_s = server.gathered_texts, server.gathering_s
        tokenizer = tokenizer.through(Gathered(tokenizer.encoder, most, wait_s))
    return tokenizer


def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer of a model folder or of a .gguf file.

    Raises:
        ModelError: missing, too large, unreadable, or with a pattern that backtracks without end.
    """
    load = load_gguf_tokenizer if path.endswith(".gguf") else load_folder_tokenizer
    tokenizer = build_backend(path, lambda: load(path))
    try:
        for probe in (*_PROBES, *tokenizer.own_probes()):
            tokenizer.encode(probe)
    except RequestError as error:
        raise ModelError(
            f"the tokenizer of {printable(path)!r} fails on a simple text: {error.text}",
            "its pre-tokenizer pattern is broken or hostile; take the tokenizer from its publisher",
        ) from None
    return tokenizer
