"""How NGRAM branches."""

from array import array

import pytest

from banyan.base.draft_tree import paths_of
from banyan.runner.speculative.base import Tree
from banyan.runner.speculative.ngram import Breadth, Ngram, grow
from tests.runner.speculative.test_ngram import asked


def tree_after(tokens, *before, count=8, flags="min-bfs-breadth 2") -> Tree:
    drafter = asked(flags)
    for seen in before:
        drafter.join(1, list(seen), b"")
        drafter.leave(1)
    drafter.join(2, list(tokens), b"")
    found = drafter.guess(2, count)
    assert isinstance(found, Tree)
    return found


def branches(tree: Tree) -> set[tuple[int, ...]]:
    """The tokens of every path."""
    return {tuple(tree.tokens[n - 1] for n in path[1:]) for path in paths_of(tree.parents)} - {()}


def test_a_token_goes_on_in_several_ways_where_so_many_are_asked_for():
    seen = [[1, 2, 3, 50, 51], [1, 2, 3, 60, 61], [1, 2, 3, 70]]
    rest = "--max-match-window-size 3 --max-bfs-breadth 3"
    two = tree_after([1, 2, 3], *seen, flags=f"min-bfs-breadth 2 {rest}")
    assert branches(two) == {(70,), (60,), (60, 61)}
    three = tree_after([1, 2, 3], *seen, flags=f"min-bfs-breadth 3 {rest}")
    assert branches(three) == {(70,), (60,), (60, 61), (50,), (50, 51)}


def test_with_one_way_drafts_are_a_chain():
    drafter = Ngram(least_breadth=1)
    drafter.join(1, [1, 2, 3, 4, 1, 2], b"")
    assert drafter.guess(1, 3) == [3, 4, 1]


def test_places_that_agree_are_one_branch_and_the_likeliest_is_told_first():
    seen = [[1, 2, 3, 50, 51], [1, 2, 3, 50, 52], [1, 2, 3, 60]]
    newest = tree_after([1, 2, 3], *seen)
    assert newest.tokens[0] == 60 and branches(newest) == {(60,), (50,), (50, 52), (50, 51)}
    frequent = tree_after([1, 2, 3], *seen, flags="min-bfs-breadth 2 --match-type PROB")
    assert frequent.tokens[0] == 50 and branches(frequent) == branches(newest)


def test_the_first_drafts_of_a_tree_are_a_tree():
    seen = [[1, 2, 3, a, b, c] for a in (50, 51) for b in (60, 61) for c in (70, 71)]
    whole = tree_after([1, 2, 3], *seen, count=14)
    assert all(parent < at for at, parent in enumerate(whole.parents))
    for count in range(1, 14):
        few = tree_after([1, 2, 3], *seen, count=count)
        assert branches(few) <= branches(whole) and len(few.tokens) == count


def test_a_shorter_suffix_is_asked_where_the_longer_one_goes_on_in_one_way():
    seen = [[8, 9, 3, 40], [1, 2, 3, 50]]
    assert branches(tree_after([1, 2, 3], *seen)) == {(50,), (40,)}
    assert tree_after([1, 2, 3], *seen).tokens == [50, 40]


@pytest.mark.parametrize(
    ("matched", "depth", "ways"), [(12, 0, 2), (1, 0, 9), (1, 3, 7), (6, 9, 2)]
)
def test_it_is_broader_behind_a_short_suffix(matched: int, depth: int, ways: int):
    assert Breadth(least=2, most=10, shortest=1, longest=12).of(matched, depth) == ways


def test_nothing_known_is_no_tree():
    assert grow([], 5, Breadth(2, 4, 1, 12), False) == Tree([], [])
    assert grow([(2, array("i"))], 5, Breadth(2, 4, 1, 12), False) == Tree([], [])
