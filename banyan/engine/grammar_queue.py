"""GrammarQueue: holds requests until their grammar is compiled, before the core receives them.
`open_grammars` opens the compiler of one model: its vocabulary and a backend.

Other requests pass. The scheduler and the journal see a request only after the wait.
"""

from collections import Counter
from collections.abc import Callable

from banyan.base.errors import RequestError
from banyan.base.ids import RequestId
from banyan.config.schema import SLOW, Config
from banyan.grammar.base import stand_ins
from banyan.grammar.compiler import GrammarCompiler, bare_of
from banyan.grammar.vocabulary import Encode, Vocabulary, vocabulary_of
from banyan.grammar.worker_pool import GrammarLimits
from banyan.kv_cache.cache import TOKEN_BYTES
from banyan.messages.events import Event, Failed, Finished
from banyan.messages.requests import Abort, Control, Generate, Message
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

        is_slow = config.server.tokenizer_mode == SLOW
        tokenizer = load_tokenizer(config.model.tokenizer_path, is_slow)
        pieces, ends, special = tokenizer.pieces, tokenizer.eos_ids, tokenizer.special_ids
        vocabulary = vocabulary_of(
            pieces.__getitem__, tokenizer.vocab_size, model_config.vocab_size, ends, special
        )
        return vocabulary, lambda text: tokenizer.encode(text, False)

    limits = GrammarLimits(time_s=grammar.timeout_s)
    backends = stand_ins(grammar.backend)
    return GrammarCompiler(backends, read, grammar.between_tokens, limits, wake)


class GrammarQueue:
    """A filter between the client's link and the core.

    Args:
        compiler: compiles in the background.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self.waiting: dict[RequestId, Generate] = {}
        """In order of arrival."""
        self._num_waiting: Counter[str] = Counter()
        """Number of waiting requests by grammar."""

    def holds(self, message: Message, events: list[Event]) -> bool:
        """Whether `message` ends here: a request that must wait, or an abort of a waiting one."""
        match message:
            case Generate():
                return bool(message.grammar) and self._take(message, events)
            case Abort():
                return self._drop(message.request, events)
            case Control(verb="abort_all"):
                for request in list(self.waiting):
                    self._drop(request, events)
            case _:
                pass
        return False

    def release(self, receive: Callable[[Generate], None]) -> None:
        """Pass on the requests whose grammar has been compiled, or cannot be compiled.

        Results are collected one at a time: a full cache of compiled grammars cannot evict one
        before its requests have been passed on.
        """
        while self._compiler.collect():
            for request, generate in list(self.waiting.items()):
                if self._compiler.has(generate.grammar):
                    del self.waiting[request]
                    del self._num_waiting[bare_of(generate.grammar)]
                    receive(generate)

    def _take(self, generate: Generate, events: list[Event]) -> bool:
        if generate.request in self.waiting:
            text = f"Duplicate request ID detected: {generate.request}"
            events.append(Failed(generate.request, 400, text, "invalid_request"))
            return True
        if self._compiler.has(generate.grammar):
            return False
        try:
            self._compiler.prepare(generate.grammar, generate.caller)
        except RequestError as error:
            events.append(Failed(generate.request, error.status, str(error), error.code))
        else:
            self.waiting[generate.request] = generate
            self._num_waiting[bare_of(generate.grammar)] += 1
        return True

    def _drop(self, request: RequestId, events: list[Event]) -> bool:
        generate = self.waiting.pop(request, None)
        if generate is None:
            return False
        bare = bare_of(generate.grammar)
        self._num_waiting[bare] -= 1
        if not self._num_waiting[bare]:
            del self._num_waiting[bare]
            self._compiler.cancel(bare)
        prompt_tokens = len(generate.tokens) // TOKEN_BYTES
        events.append(
            Finished(
                request=request,
                reason="abort",
                prompt_tokens=prompt_tokens,
                output_tokens=0,
                cached_tokens=0,
            )
        )
        return True
