"""What a router remembers of prompts, and how it chooses by that."""

import random

import pytest

from banyan.scheduler.routing import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    CacheAware,
    Prefixes,
    cache_aware,
    consistent_hashing,
    power_of_two,
    prefix_keys,
)


def test_prompts_share_as_many_keys_as_blocks_at_the_start() -> None:
    lots = random.Random(1)
    for _ in range(200):
        size, shared = lots.randrange(900), lots.randrange(900)
        first = lots.randbytes(size)
        second = first[:shared] + lots.randbytes(lots.randrange(900))
        same = next(
            (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
            min(len(first), len(second)),
        )
        prefixes = Prefixes(100)
        prefixes.add(prefix_keys(first))
        assert prefixes.matched(prefix_keys(second)) == same // BLOCK_BYTES
        prefixes.check()


def test_memory_is_bounded_and_the_oldest_prompt_goes_first() -> None:
    prefixes = Prefixes(10)
    prompts = [prefix_keys(bytes([at]) * BLOCK_BYTES * 4) for at in range(4)]
    for keys in prompts[:2]:
        prefixes.add(keys)
    prefixes.add(prompts[0])
    prefixes.add(prompts[2])
    prefixes.check()
    assert len(prefixes) == 10
    assert [prefixes.matched(keys) for keys in prompts] == [4, 2, 4, 0]


def test_a_prompt_of_any_length_takes_bounded_work() -> None:
    assert len(prefix_keys(b"x" * (BLOCK_BYTES * MAX_BLOCKS + 10_000))) == MAX_BLOCKS
    assert prefix_keys(b"x" * (BLOCK_BYTES - 1)) == []


@pytest.mark.parametrize(
    ("requests", "seen", "held", "chosen"),
    [
        ([0, 0, 0], [0.0, 0.9, 0.5], [5, 9, 0], 1),
        ([0, 0, 0], [0.1, 0.3, 0.2], [5, 9, 4], 2),
        ([3, 1, 1], [0.0, 0.0, 0.0], [0, 9, 4], 2),
        ([70, 80, 20], [0.0, 0.9, 0.0], [0, 0, 0], 1),
        ([10, 100, 12], [0.0, 0.9, 0.0], [0, 0, 0], 0),
        ([2, 1], [0.8, 0.8], [0, 0], 1),
    ],
)
def test_a_cached_beginning_decides_unless_the_load_is_too_uneven(
    requests: list[int], seen: list[float], held: list[int], chosen: int
) -> None:
    assert cache_aware(requests, seen, held, CacheAware()) == chosen


def test_of_two_drawn_servers_the_idler_one_is_taken() -> None:
    assert [power_of_two([3, 1, 2], *drawn) for drawn in ((0, 1), (1, 2), (2, 0))] == [1, 1, 2]


def test_only_the_keys_of_a_server_that_goes_move() -> None:
    names = [f"http://host:{port}" for port in range(5)]
    before = {f"{at}": consistent_hashing(names, f"{at}") for at in range(500)}
    after = {key: consistent_hashing(names[:-1], key) for key in before}
    assert all(after[key] == at for key, at in before.items() if at != 4)
    assert all(60 < list(before.values()).count(at) < 140 for at in range(5))
