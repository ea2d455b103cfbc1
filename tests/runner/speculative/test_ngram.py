"""What NGRAM makes of what it has seen."""

from array import array
from random import Random

import pytest

from banyan.base.draft_tree import paths_of
from banyan.config.schema import SpeculativeConfig
from banyan.runner.speculative import DRAFTERS, Tree
from banyan.runner.speculative.draft_runner import DraftRunner
from banyan.runner.speculative.ngram import Breadth, Ngram, grow
from tests.support.flags import config_of


def asked(words: str = "") -> Ngram:
    """The drafter that flags ask for, without their common beginning."""
    flags = [f"--speculative-ngram-{word}" for word in words.split(" --") if word]
    config = config_of("--speculative-algorithm", "NGRAM", *" ".join(flags).split())
    return DRAFTERS.load("NGRAM")(config.speculative, no_model)


def drafts_after(tokens, *before, count=8, namespace=b"", flags=""):
    """What is drafted behind `tokens`, once sequences of the empty namespace have come and gone."""
    drafter = asked(flags)
    for seen in before:
        drafter.join(1, list(seen), b"")
        drafter.leave(1)
    drafter.join(2, list(tokens), namespace)
    return drafter.guess(2, count)


def test_a_prompt_is_its_own_best_source():
    assert drafts_after([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == [4, 5, 6, 7, 1, 2]


def test_what_others_have_said_is_continued():
    assert drafts_after([9, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7]) == [5, 6, 7]


def test_nothing_is_drafted_where_nothing_was_seen():
    assert drafts_after([1, 2, 3]) == []


def test_a_namespace_hears_nothing_of_another():
    assert drafts_after([2, 3, 4], [2, 3, 4, 5, 6], namespace=b"tenant") == []
    assert drafts_after([2, 3, 4], [2, 3, 4, 5, 6], namespace=b"") == [5, 6]


def test_the_longest_suffix_decides():
    seen = [[7, 1, 2, 3, 50], [8, 1, 2, 3, 60]]
    assert drafts_after([7, 1, 2, 3], *seen)[:1] == [50]
    assert drafts_after([8, 1, 2, 3], *seen)[:1] == [60]


def test_a_suffix_shorter_than_the_shortest_is_not_followed():
    assert drafts_after([9, 2], [1, 2, 3], flags="min-match-window-size 1") == [3]
    assert drafts_after([9, 2], [1, 2, 3], flags="min-match-window-size 2") == []


def test_places_that_agree_over_more_than_the_longest_suffix_are_equal():
    seen = [[7, 1, 2, 3, 50], [8, 1, 2, 3, 60]]
    assert drafts_after([7, 1, 2, 3], *seen, flags="max-match-window-size 4")[:1] == [50]
    assert drafts_after([7, 1, 2, 3], *seen, flags="max-match-window-size 3")[:1] == [60]


def test_no_more_places_are_looked_at_than_the_limit():
    seen = [[7, 1, 2, 3, 50], [8, 1, 2, 3, 60], [9, 1, 2, 3, 70]]
    assert drafts_after([7, 1, 2, 3], *seen, flags="max-bfs-breadth 3")[:1] == [50]
    assert drafts_after([7, 1, 2, 3], *seen, flags="max-bfs-breadth 2")[:1] == [70]


def test_the_newest_continuation_is_drafted_or_the_most_frequent():
    seen = [[1, 2, 3, 50], [1, 2, 3, 50], [1, 2, 3, 60]]
    assert drafts_after([1, 2, 3], *seen)[:1] == [60]
    assert drafts_after([1, 2, 3], *seen, flags="match-type PROB")[:1] == [50]


def test_a_continuation_ends_with_its_branch():
    seen = list(range(40))
    assert (
        len(
            drafts_after(
                seen[:12], seen, count=30, flags="branch-length 18 --min-match-window-size 1"
            )
        )
        == 17
    )
    assert (
        len(
            drafts_after(
                seen[:12], seen, count=30, flags="branch-length 6 --min-match-window-size 2"
            )
        )
        == 4
    )


def test_a_short_suffix_brings_few_drafts():
    assert drafts_after([99, 2], [1, 2, 3, 4, 5, 6]) == [3, 4]


def test_the_sequence_that_left_first_is_forgotten_first():
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    assert drafts_after([2, 3], first, second, flags="capacity 180") == [4]
    assert drafts_after([2, 3], first, second, flags="capacity 162") == []
    assert drafts_after([6, 7], first, second, flags="capacity 162") == [8]


def test_tokens_that_are_taken_back_leave_no_trace():
    drafter = Ngram()
    drafter.join(1, [1, 2, 3, 4, 5], b"")
    drafter.extend(1, 3, [7, 8])
    drafter.join(2, [1, 2, 3], b"")
    assert drafter.guess(2, 4) == [7, 8]
    drafter.join(3, [4], b"")
    assert drafter.guess(3, 4) == []


def test_memory_is_bounded_and_counts_true():
    random, drafter = Random(0), Ngram(capacity=300)
    lengths: dict[int, int] = {}
    for _ in range(2000):
        slot = random.randrange(1, 5)
        if slot not in lengths:
            tokens = [random.randrange(9) for _ in range(random.randrange(1, 40))]
            drafter.join(slot, tokens, random.choice((b"", b"a", b"b")))
            lengths[slot] = len(tokens)
        elif random.random() < 0.2:
            drafter.leave(slot)
            del lengths[slot]
        else:
            first = lengths[slot] - (random.random() < 0.2)
            drafter.extend(slot, first, [random.randrange(9)])
            lengths[slot] = first + 1
            assert len(drafter.guess(slot, 5)) <= 5
        assert drafter.num_tokens <= max(300, sum(lengths.values()))
        places = sum(len(kind) for heads in drafter._heads.values() for kind in heads)
        assert places <= 2 * drafter.num_tokens
    for slot in list(lengths):
        drafter.leave(slot)
    for _ in range(400):
        drafter.join(1, [random.randrange(100, 1000)], b"other")
        assert len(drafter.guess(1, 5)) <= 5
        drafter.leave(1)
    assert set(drafter._heads) == {b"other"}


def no_model() -> DraftRunner:
    raise AssertionError("it needs none")


def test_who_is_asked_late_drafts_as_who_was_asked_all_along():
    random, often, late = Random(3), Ngram(), Ngram()
    for _ in range(60):
        tokens = [random.randrange(5) for _ in range(random.randrange(1, 30))]
        for drafter in (often, late):
            drafter.join(1, tokens, b"")
        length = len(tokens)
        for _ in range(random.randrange(20)):
            first, more = length - random.randrange(2), [random.randrange(5)]
            for drafter in (often, late):
                drafter.extend(1, first, more)
            length = first + 1
            often.guess(1, 8)
        assert often.guess(1, 8) == late.guess(1, 8)
        for drafter in (often, late):
            drafter.leave(1)


def test_what_is_flushed_is_not_drafted_again():
    drafter = Ngram()
    drafter.join(1, [1, 2, 3, 4, 5], b"")
    drafter.leave(1)
    drafter.join(2, [7, 1, 2, 3], b"")
    assert drafter.guess(2, 2) == [4, 5]
    drafter.flush()  # the slot has not left yet
    assert drafter.num_tokens == 0 and not drafter._heads
    drafter.leave(2)
    drafter.join(2, [7, 1, 2, 3], b"")
    assert drafter.guess(2, 2) == []


def test_two_drafters_that_get_the_same_draft_the_same():
    asked = SpeculativeConfig(algorithm="NGRAM")
    mine, other = (DRAFTERS.load("NGRAM")(asked, no_model) for _ in range(2))
    random = Random(3)
    for slot in range(1, 6):
        tokens = [random.randrange(6) for _ in range(30)]
        for drafter in (mine, other):
            drafter.join(slot, tokens, b"")
    for slot in range(1, 6):
        assert mine.guess(slot, 11) == other.guess(slot, 11) != []


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


def test_places_that_agree_are_one_branch_and_the_likeliest_is_reported_first():
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
