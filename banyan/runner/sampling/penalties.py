"""Penalties and bans on one row of logits, in place.

Counts are taken from the slot's own tokens at each step, so that they are right after a retraction
and cost no state. Order: frequency, presence, repetition, min_new_tokens; the mask and logit_bias
follow (see masks.py and sampler.py).
"""

import numpy as np


def penalise(
    logits: np.ndarray,
    tokens: np.ndarray,
    prompt_len: int,
    frequency: float,
    presence: float,
    repetition: float,
) -> None:
    """Lower the logits of tokens that were there before.

    logits: [vocab] float32; tokens: [known] int32, prompt and output.
    frequency: subtracted once per occurrence in the output; presence: subtracted once from what
    occurs in the output; repetition: divides positive and multiplies negative logits of what
    occurs in prompt or output (Keskar et al., CTRL, 2019).
    """
    if frequency or presence:
        ids, counts = np.unique(tokens[prompt_len:], return_counts=True)
        logits[ids] -= np.float32(frequency) * counts.astype(np.float32) + np.float32(presence)
    if repetition != 1.0:
        ids = np.unique(tokens)
        before = logits[ids]
        scale = np.float32(repetition)
        logits[ids] = np.where(before > 0, before / scale, before * scale)
