"""Opens the grammar compiler of one model: its vocabulary and a backend.

Used by a replica's loop and by `banyan replay`; imports no torch.
"""

from collections.abc import Callable

from banyan.config.schema import Config
from banyan.grammar.base import stand_ins
from banyan.grammar.compiler import GrammarCompiler
from banyan.grammar.vocabulary import Encode, Vocabulary, vocabulary_of
from banyan.grammar.worker_pool import GrammarLimits
from banyan.model_config.model_config import ModelConfig


def open_grammars(
    config: Config, model_config: ModelConfig, wake: Callable[[], None] = lambda: None
) -> GrammarCompiler | None:
    """Open the compiler; None if grammars are off. The first grammar loads the tokenizer."""
    grammar = config.grammar
    if grammar.backend in ("", "none"):
        return None

    def read() -> tuple[Vocabulary, Encode]:
        from banyan.tokenizer.load import load_tokenizer  # imports tokenizers

        tokenizer = load_tokenizer(config.model.tokenizer_path)
        pieces, ends, special = tokenizer.pieces, tokenizer.eos_ids, tokenizer.special_ids
        vocabulary = vocabulary_of(
            pieces.__getitem__, tokenizer.vocab_size, model_config.vocab_size, ends, special
        )
        return vocabulary, lambda text: tokenizer.encode(text, False)

    limits = GrammarLimits(time_s=grammar.timeout_s)
    backends = stand_ins(grammar.backend)
    return GrammarCompiler(backends, read, grammar.between_tokens, limits, wake)
