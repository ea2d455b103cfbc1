"""The oracle: tokens, log-probabilities and masks as pure functions of a request's own sequence.

What a request must answer is known without any engine: one request, one token at a time. What a
sequence means is a `Story`: here a hash, in page_oracle.py what a real model makes of it.
"""

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from banyan.kv_cache.cache import TOKEN_BYTES
from banyan.messages.requests import Generate

VOCAB = 32
BARRED = -1
"""In place of a token where everything is forbidden."""
STOP_IDS = (3, 11)
_MODULUS = (1 << 61) - 1


def mix(state: int, value: int) -> int:
    """One step of the hash that stands for "everything so far, and then this"."""
    return (state * 6364136223846793005 + value * 1442695040888963407 + 12345) % _MODULUS


def bits(values: int) -> int:
    """A well-stirred form of a hash, for drawing small numbers from it."""
    values ^= values >> 29
    return (values * 0x9E3779B97F4A7C15 & (2**64 - 1)) >> 33


def start_of(namespace: bytes) -> int:
    """Hash of the empty sequence; sequences of different namespaces never agree."""
    return mix(17, int.from_bytes(namespace, "little"))


def mask_at(state: int) -> bytes:
    """Which tokens the grammar allows after an output with this hash: often one, never none."""
    if bits(mix(state, 8)) % 2:
        return (1 << bits(mix(state, 6)) % VOCAB).to_bytes(VOCAB // 8, "little")
    word = bits(mix(state, 5)) | 1 << bits(mix(state, 6)) % VOCAB
    return (word % (1 << VOCAB)).to_bytes(VOCAB // 8, "little")


def allows(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> (token % 8) & 1)


def next_token(state: int, seed: int, mask: bytes) -> int:
    """The token after a sequence with hash `state`; `mask` b"" = no constraint."""
    choice = bits(mix(state, seed + 100))
    if not mask:
        return choice % VOCAB
    allowed = [t for t in range(VOCAB) if allows(mask, t)]
    return allowed[choice % len(allowed)]


def logprob(before: int, token: int) -> float:
    """Log-probability of `token` after a sequence with hash `before`; exact in float32."""
    return -(bits(mix(before, token)) % 4096) / 256.0


def vector(state: int) -> bytes:
    """The pooled vector of a sequence with hash `state`."""
    return array("f", [bits(mix(state, 7)) % 4096]).tobytes()


class HashGrammar:
    """A constraint whose mask depends on the whole output. Satisfies grammar.base.Grammar."""

    def __init__(self) -> None:
        self._states = [0]

    @property
    def is_ended(self) -> bool:
        return False

    @property
    def problem(self) -> str:
        return ""

    def mask(self) -> bytes:
        return mask_at(self._states[-1])

    def forced(self) -> list[int]:
        state, found = self._states[-1], list[int]()
        while (word := int.from_bytes(mask_at(state), "little")).bit_count() == 1:
            found.append(word.bit_length() - 1)
            state = mix(state, found[-1])
        return found

    def accept(self, token: int) -> bool:
        if not allows(self.mask(), token):
            return False
        self._states.append(mix(self._states[-1], token))
        return True

    def rollback(self, count: int) -> None:
        if count:
            del self._states[-count:]


class Story(Protocol):
    """One sequence that only grows, and what the runner under test must make of it."""

    def append(self, token: int) -> None: ...
    def next_token(self, mask: bytes) -> int:
        """The token after the whole sequence, or BARRED; `mask` b"" = no constraint."""
        ...

    def logprob(self, position: int) -> float:
        """Of the token at `position`."""
        ...

    def vector(self) -> bytes:
        """float32: the pooled vector of the prompt."""
        ...

    def hidden(self, position: int) -> bytes:
        """float32: the hidden state of one position."""
        ...


class HashStory:
    """The story as a fake runner tells it."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._tokens: list[int] = []
        self._hashes = [start_of(generate.namespace)]
        """By length: hash of that many tokens."""

    def append(self, token: int) -> None:
        self._tokens.append(token)
        self._hashes.append(mix(self._hashes[-1], token))

    def next_token(self, mask: bytes) -> int:
        return next_token(self._hashes[-1], self._generate.sampling.seed, mask)

    def logprob(self, position: int) -> float:
        return logprob(self._hashes[position], self._tokens[position])

    def vector(self) -> bytes:
        return vector(self._hashes[len(self._generate.tokens) // TOKEN_BYTES])

    def hidden(self, position: int) -> bytes:
        return vector(self._hashes[position + 1])


@dataclass
class Answer:
    """The right output of one request, as far as it was asked for."""

    generate: Generate
    story: Story
    tokens: list[int] = field(default_factory=list)
    grammar_state: int = 0

    def __post_init__(self) -> None:
        for token in array("i", self.generate.tokens):
            self._append(token)

    @property
    def prompt_len(self) -> int:
        return len(self.generate.tokens) // TOKEN_BYTES

    def output(self, index: int) -> int:
        """The output token at `index`, as if nothing ever ended the request; BARRED from where
        no token may follow."""
        while len(self.tokens) <= self.prompt_len + index:
            mask = mask_at(self.grammar_state) if self.generate.grammar else b""
            token = self.story.next_token(mask)
            if token == BARRED:
                return BARRED
            self._append(token)
            self.grammar_state = mix(self.grammar_state, token)
        return self.tokens[self.prompt_len + index]

    def score(self, position: int) -> float:
        self._reach(position)
        return self.story.logprob(position)

    def hidden(self, position: int) -> bytes:
        self._reach(position)
        return self.story.hidden(position)

    def end(self) -> tuple[str, int, int]:
        """(reason, output tokens, matched id) when nobody interferes."""
        sampling = self.generate.sampling
        for index in range(sampling.max_new_tokens):
            token = self.output(index)
            if token == BARRED:
                return "barred", index, BARRED
            if token in sampling.stop_ids and index + 1 > sampling.min_new_tokens:
                return "stop", index + 1, token
        return "length", sampling.max_new_tokens, -1

    def _reach(self, position: int) -> None:
        if position >= self.prompt_len:
            self.output(position - self.prompt_len)

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.story.append(token)
