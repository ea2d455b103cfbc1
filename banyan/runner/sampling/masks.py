"""Grammar masks: bits of allowed tokens, little-endian, bit i = token i."""

import numpy as np


def banned(bits: bytes, vocab_size: int) -> np.ndarray:
    """Which tokens a mask forbids: [vocab] bool.

    Raises:
        ValueError: the mask does not cover the vocabulary.
    """
    need = -(-vocab_size // 8)
    if len(bits) < need:
        raise ValueError(f"the grammar mask has {len(bits)} bytes; {vocab_size} tokens need {need}")
    allowed = np.unpackbits(
        np.frombuffer(bits, np.uint8, need), count=vocab_size, bitorder="little"
    )
    return allowed == 0
