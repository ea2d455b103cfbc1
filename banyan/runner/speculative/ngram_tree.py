"""The continuations of several places as one tree of drafts: as far as they agree, one branch."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count as count_up

from banyan.runner.speculative.base import Tree

_LESS_FOR_OLDER = 0.5
"""Of what the next newer place counts, where the newest one goes on."""


@dataclass(frozen=True)
class Breadth:
    """How many ways a token goes on at most: `most` of them behind the shortest suffix, `least`
    behind the longest, and one step less with each token from there.

    Attributes:
        shortest, longest: suffixes that are looked for, in tokens.
    """

    least: int
    most: int
    shortest: int
    longest: int

    def of(self, matched: int, depth: int) -> int:
        step = (self.most - self.least) / (self.longest - self.shortest + 1)
        return max(self.least, int(self.least + (self.longest - matched - depth) * step))


@dataclass
class _Node:
    """
    Attributes:
        weight: of the places that lead here; matched: the longest suffix that one of them shares.
        ways: what comes next, in the order in which it was found.
    """

    weight: float = 0.0
    matched: int = 0
    ways: dict[int, "_Node"] = field(default_factory=dict[int, "_Node"])


def grow(
    places: Sequence[tuple[int, "array[int]"]], count: int, breadth: Breadth, is_frequent: bool
) -> Tree:
    """The `count` likeliest drafts.

    places: (tokens of the suffix that they share with the request, what follows), the best first;
    is_frequent: all of them count alike, else a newer one counts more.
    """
    root = _Node()
    for order, (matched, tokens) in enumerate(places):
        weight = 1.0 if is_frequent else _LESS_FOR_OLDER**order
        node = root
        for token in tokens:
            _pass(node, weight, matched)
            node = node.ways.setdefault(token, _Node())
        _pass(node, weight, matched)
    return _best(root, count, breadth)


def _pass(node: _Node, weight: float, matched: int) -> None:
    node.weight += weight
    node.matched = max(node.matched, matched)


def _best(root: _Node, count: int, breadth: Breadth) -> Tree:
    """Nodes by the share of the weights that leads there, the nearer first among equals."""
    tokens: list[int] = []
    parents: list[int] = []
    ahead: list[tuple[float, int, int, int, int, _Node]] = []
    order = count_up()

    def look(node: _Node, share: float, depth: int, at: int) -> None:
        ways = sorted(node.ways.items(), key=lambda way: -way[1].weight)
        for token, way in ways[: breadth.of(node.matched, depth)]:
            part = share * way.weight / node.weight
            heappush(ahead, (-part, depth, next(order), token, at, way))

    look(root, 1.0, 0, -1)
    while ahead and len(tokens) < count:
        share, depth, _, token, at, node = heappop(ahead)
        tokens.append(token)
        parents.append(at)
        look(node, -share, depth + 1, len(tokens) - 1)
    return Tree(tokens, parents)
