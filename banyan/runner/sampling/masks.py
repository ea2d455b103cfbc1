"""Grammar masks: bits of allowed tokens, little-endian, bit i = token i."""

import numpy as np


def banned(bits: bytes, vocab_size: int) -> np.ndarray:
    """Which tokens a mask forbids: [vocab] bool; an empty mask forbids none.

    Raises:
        ValueError: the mask does not cover the vocabulary.
    """
    if not bits:
        return np.zeros(vocab_size, dtype=bool)
    need = -(-vocab_size // 8)
    if len(bits) < need:
        raise ValueError(f"the grammar mask has {len(bits)} bytes; {vocab_size} tokens need {need}")
    allowed = np.unpackbits(
        np.frombuffer(bits, np.uint8, need), count=vocab_size, bitorder="little"
    )
    return allowed == 0
