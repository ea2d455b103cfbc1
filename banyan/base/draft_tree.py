"""Trees of draft tokens, as plain numbers, for the scheduler and the runner.

Each draft has a parent: the index of an earlier draft, or -1 for the newest token. In a chain each
draft follows the one before.
"""

from collections.abc import Sequence


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each draft follows the one before."""
    return all(parent == at - 1 for at, parent in enumerate(parents))


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """The path to the newest token (position 0) and to each draft (from 1), as positions from 0."""
    paths = [[0]]
    for at, parent in enumerate(parents, 1):
        paths.append([*paths[parent + 1], at])
    return paths


def accepted_path(
    drafts: Sequence[int], parents: Sequence[int], sampled: Sequence[int]
) -> list[int]:
    """The accepted positions of a row, from its newest token (0).

    At each position the sampled token selects the child draft with the same token.

    drafts, parents: [n]; sampled: [n + 1], the token after the newest one and after each draft.
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
    """For each draft, the number of earlier drafts with the same parent."""
    seen = dict[int, int]()
    ranks = list[int]()
    for parent in parents:
        ranks.append(seen.get(parent, 0))
        seen[parent] = ranks[-1] + 1
    return ranks
