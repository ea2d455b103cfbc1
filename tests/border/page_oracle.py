"""The story of a sequence as a real runner with the model of page_numbers.py must tell it."""

from array import array

import numpy as np

from banyan.kv_cache.cache import TOKEN_BYTES
from banyan.messages.requests import Generate
from banyan.ops.sampling import banned, draw, log_softmax_at, penalise, quantile
from tests.border.far_numbers import FarPrefix
from tests.border.oracle import BARRED
from tests.border.page_features import PLACEHOLDER, codes_at
from tests.border.page_numbers import VOCAB, Prefix


class PageStory:
    """
    Args:
        windows: by layer of the model, positions that it sees; 0 = all.
        prefix: the numbers of the model.
    """

    def __init__(
        self,
        generate: Generate,
        windows: tuple[int, ...],
        prefix: type[Prefix] | type[FarPrefix] = Prefix,
    ) -> None:
        self._sampling = generate.sampling
        self._prompt_len = len(generate.tokens) // TOKEN_BYTES
        self._prefix = prefix(windows)
        self._edited = dict[int, np.ndarray]()
        """By position of an output: the logits that its token is chosen from."""
        self._given = codes_at(generate.spans)
        self._is_barred = False
        """The runner cannot take the sequence: a token is none of the vocabulary."""

    def append(self, token: int) -> None:
        given = self._given.get(len(self._prefix.tokens))
        if given is not None:
            assert isinstance(self._prefix, Prefix)
            self._prefix.append(PLACEHOLDER, given)
        elif token < VOCAB:
            self._prefix.append(token)
        else:
            self._is_barred = True

    def next_token(self, mask: bytes) -> int:
        if self._is_barred:
            return BARRED
        sampling, position = self._sampling, len(self._prefix.tokens)
        logits = self._prefix.logits(position - 1)
        penalise(
            logits,
            np.array(self._prefix.tokens, np.int32),
            self._prompt_len,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty,
        )
        if mask:
            logits[banned(np.frombuffer(mask, np.uint8), VOCAB)] = -np.inf
        if position - self._prompt_len < sampling.min_new_tokens:
            logits[list(sampling.stop_ids)] = -np.inf
        for token, bias in sampling.logit_bias.items():
            logits[token] += np.float32(bias)
        if np.isneginf(logits).all():
            return BARRED
        self._edited[position] = logits.copy()
        if sampling.is_greedy:
            return int(np.argmax(logits))
        filters = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        return draw(logits, *filters, quantile(sampling.seed, position))

    def logprob(self, position: int) -> float:
        is_output = position >= self._prompt_len and not self._sampling.is_greedy
        temperature = self._sampling.temperature if is_output else 1.0
        logits = self._edited.get(position)
        if logits is None:
            logits = self._prefix.logits(position - 1)
        token = np.array([self._prefix.tokens[position]])
        return float(log_softmax_at(logits, temperature, token)[0])

    def vector(self) -> bytes:
        return self.hidden(self._prompt_len - 1)

    def hidden(self, position: int) -> bytes:
        return array("f", self._prefix.hidden(position)).tobytes()
