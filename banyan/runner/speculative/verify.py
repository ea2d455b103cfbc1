"""What it means that the model accepts drafts.

A verify row runs the last token and drafts behind it, a chain or branches, so it has logits after
each of them, and a token is sampled from each by the request's own rules: penalties, masks and
biases as they are with the drafts that lead there, and the quantile of its position. That token is
a function of the logits, the parameters, the seed and the position alone (ops/sampling.py). So a
draft stands where it is the token that was sampled behind the one that it follows, and that one
stands: what was sampled up to there is what would have been sampled without drafts, token by token,
greedy or not, and what was sampled behind others rests on a draft that does not stand.
"""

from collections.abc import Sequence

from banyan.base.draft_tree import standing_path


def standing(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many of the sampled tokens stand behind a chain: the accepted drafts and one more.

    drafts: [n]; sampled: [n + 1], the token after the row's last known one and after each draft.
    """
    for i, draft in enumerate(drafts):
        if sampled[i] != draft:
            return i + 1
    return len(drafts) + 1


def standing_places(
    drafts: Sequence[int], parents: Sequence[int], sampled: Sequence[int]
) -> list[int]:
    """Which of the sampled tokens stand, in order; parents: as of drafts that branch, or empty."""
    if parents:
        return standing_path(drafts, parents, sampled)
    return list(range(standing(drafts, sampled)))
