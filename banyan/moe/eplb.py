"""EPLB: places experts and their copies so that ranks have equal loads.

Greedy, as published with DeepSeek's EPLB: the most loaded expert is copied next, and the heaviest
goes to the least loaded rank with a free place. Deterministic.
"""

import numpy as np


def trivial(layers: int, experts: int, places: int) -> np.ndarray:
    """[layers, places]: experts in order, then the first ones again."""
    return np.tile(np.arange(places) % experts, (layers, 1))


def balanced(
    loads: np.ndarray, places: int, ranks: int, groups: int = 1, nodes: int = 1
) -> np.ndarray:
    """The expert at each place, [layers, places], from loads [layers, experts].

    Every expert has a place. The places of a rank follow each other, and so do the ranks of a node.

    Args:
        places: total, a multiple of `ranks`, and at least the number of experts.
        groups: number of groups of consecutive experts; a token uses few groups. If nodes divide
            them, each group is placed on one node, copies included.
    """
    layers, experts = loads.shape
    assert places >= experts and places % ranks == 0 and ranks % nodes == 0
    if groups % nodes or experts % groups:
        groups, nodes = 1, 1
    found = np.zeros((layers, places), np.int64)
    for layer in range(layers):
        found[layer] = _layer(loads[layer].astype(np.float64), places, ranks, groups, nodes)
    return found


def _layer(loads: np.ndarray, places: int, ranks: int, groups: int, nodes: int) -> list[int]:
    size = len(loads) // groups
    of_nodes = packed(loads.reshape(groups, size).sum(-1), nodes)
    found: list[int] = []
    for mine in of_nodes:
        experts = [group * size + at for group in mine for at in range(size)]
        local = copied(loads[experts], places // nodes)
        copies = np.bincount(local, minlength=len(experts))
        each = loads[experts][local] / copies[local]
        for rank in packed(each, ranks // nodes):
            found += sorted(experts[local[at]] for at in rank)
    return found


def copied(loads: np.ndarray, places: int) -> np.ndarray:
    """[places]: every index of `loads`, then indices again whose copies would have the highest
    load."""
    copies = np.ones(len(loads), np.int64)
    found = list(range(len(loads)))
    for _ in range(places - len(loads)):
        busiest = int(np.argmax(loads / copies))
        copies[busiest] += 1
        found.append(busiest)
    return np.array(found)


def packed(loads: np.ndarray, packs: int) -> list[list[int]]:
    """Indices of `loads` in packs of equal size: the heaviest first, each to the lightest pack that
    is not full."""
    room = len(loads) // packs
    found: list[list[int]] = [[] for _ in range(packs)]
    sums = np.zeros(packs)
    for index in np.argsort(-loads, kind="stable").tolist():
        best = int(np.argmin(sums))
        found[best].append(index)
        sums[best] += loads[index]
        if len(found[best]) == room:
            sums[best] = np.inf
    return found


def kept_in_place(wanted: np.ndarray, present: np.ndarray, ranks: int) -> np.ndarray:
    """`wanted` with the places of each rank reordered so that experts that are there already stay.
    Both [places]."""
    found = wanted.reshape(ranks, -1).copy()
    for rank, before in enumerate(present.reshape(ranks, -1).tolist()):
        left = found[rank].tolist()
        row: list[int | None] = []
        for expert in before:
            row.append(expert if expert in left else None)
            if expert in left:
                left.remove(expert)
        found[rank] = [left.pop(0) if expert is None else expert for expert in row]
    return found.reshape(-1)


def unevenness(loads: np.ndarray, logical: np.ndarray, ranks: int) -> float:
    """Load of the busiest rank over the mean, the worst of all layers. Copies share a load equally.
    loads: [layers, experts]; logical: [layers, places]."""
    worst = 1.0
    for of_layer, at in zip(loads.astype(np.float64), logical, strict=True):
        copies = np.bincount(at, minlength=len(of_layer))
        of_ranks = (of_layer[at] / copies[at]).reshape(ranks, -1).sum(-1)
        if of_ranks.sum():
            worst = max(worst, float(of_ranks.max() / of_ranks.mean()))
    return worst
