"""Drafts that branch: each follows another one of them, its parent, which is told before it; parent
-1 is the newest token. A chain, in which each follows the one before, goes without parents. Plain
numbers: whoever plans, masks, verifies or reads drafts counts alike.
"""

from collections.abc import Sequence


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each follows the one before."""
    return all(parent == at - 1 for at, parent in enumerate(parents))


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """Of the newest token, which counts as 0, and of each draft, counted from 1: what leads there,
    itself the last."""
    paths = [[0]]
    for at, parent in enumerate(parents, 1):
        paths.append([*paths[parent + 1], at])
    return paths


def standing_path(
    drafts: Sequence[int], parents: Sequence[int], sampled: Sequence[int]
) -> list[int]:
    """Which places of a row stand, from its newest token, 0, on: at each of them the sampled token
    leads to the draft that foresaw it.

    drafts, parents: [n]; sampled: [n + 1], the token behind the newest one and behind each draft.
    """
    path = [0]
    while True:
        here = path[-1]
        for at, (draft, parent) in enumerate(zip(drafts, parents, strict=True), 1):
            if parent == here - 1 and draft == sampled[here]:
                path.append(at)
                break
        else:
            return path


def ranks_of(parents: Sequence[int]) -> list[int]:
    """Of each draft, how many that follow the same token come before it."""
    seen = dict[int, int]()
    ranks = list[int]()
    for parent in parents:
        ranks.append(seen.get(parent, 0))
        seen[parent] = ranks[-1] + 1
    return ranks
