"""--radix-eviction-policy and its numbers: what is asked for is honoured, or refused by name."""

import json

import pytest

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.config.flags.table import GROUPS
from banyan.kv_cache.eviction import EVICTION
from tests.config.test_execution import resolved


def policy(name: str, **numbers: object) -> dict[str, int]:
    flags = ("--radix-eviction-policy", name, "--radix-eviction-policy-config")
    return resolved(*flags, json.dumps(numbers)).cache.eviction_numbers


def test_every_choice_of_the_flag_is_a_policy() -> None:
    flags = {flag.name: flag for _, some in GROUPS for flag in some}
    assert set(flags["radix-eviction-policy"].choices) == set(EVICTION.names())


def test_numbers_reach_the_policy_that_takes_them() -> None:
    assert policy("slru", protected_threshold=4) == {"protected_threshold": 4}
    known = {"threshold": 4096, "next_prompt_estimate": 0}
    assert policy("tlru", **known) == known


@pytest.mark.parametrize(
    ("name", "numbers", "why"),
    [
        ("lru", {"protected_threshold": 4}, "lru takes no 'protected_threshold'. It takes no num"),
        ("slru", {"protected_treshold": 4}, "slru takes no 'protected_treshold'"),
        ("slru", {"protected_threshold": 0}, r"must be an integer in \[1, 2\^31\), got 0"),
        ("slru", {"protected_threshold": 1 << 31}, "got 2147483648"),
        ("slru", {"protected_threshold": 1 << 64}, "got 18446744073709551616"),
        ("slru", {"protected_threshold": True}, "got True"),
        ("slru", {"protected_threshold": 2.5}, "got 2.5"),
        ("tlru", {}, "tlru needs threshold and next_prompt_estimate"),
        ("tlru", {"threshold": 9}, "tlru needs next_prompt_estimate"),
        ("tlru", {"threshold": 9, "next_prompt_estimate": 9}, "9 must be above .* 9"),
    ],
)
def test_numbers_without_a_place_are_refused(
    name: str, numbers: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        policy(name, **numbers)


def test_priorities_decide_on_evictions_only_where_they_count() -> None:
    flags = ["--radix-eviction-policy", "priority"]
    (note,) = parse(flags, Environment()).observe.notes
    assert "without --enable-priority-scheduling it is the same as lru" in note
    assert not parse([*flags, "--enable-priority-scheduling"], Environment()).observe.notes
