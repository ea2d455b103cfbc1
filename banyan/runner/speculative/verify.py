"""What it means that the model accepts drafts.

A verify row runs the last token and a chain of drafts, so it has logits after each of them, and a
token is sampled from each by the request's own rules: penalties, masks and biases as they are with
the drafts before it, and the quantile of its position. That token is a function of the logits, the
parameters, the seed and the position alone (ops/sampling.py). So the first draft that differs from
the sampled token before it ends the chain: what was sampled up to there is what would have been
sampled without drafts, token by token, greedy or not, and what was sampled behind it rests on a
draft that does not stand.
"""

from collections.abc import Sequence


def standing(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many of the sampled tokens stand: the accepted drafts and one more.

    drafts: [n]; sampled: [n + 1], the token after the row's last known one and after each draft.
    """
    for i, draft in enumerate(drafts):
        if sampled[i] != draft:
            return i + 1
    return len(drafts) + 1
