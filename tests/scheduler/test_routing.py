"""Where a request goes: in turn, or to whoever has least to do."""

import pytest

from banyan.base.errors import ConfigError
from banyan.scheduler.routing import ROUTES


def test_in_turn_every_replica_takes_its_share():
    route = ROUTES.load("round_robin")
    assert [route([9, 0, 3], [0, 0, 0], n) for n in range(6)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("method", "requests", "tokens", "chosen"),
    [
        ("total_requests", [2, 1, 3], [10, 900, 5], 1),
        ("total_requests", [2, 2, 2], [10, 9, 5], 0),
        ("total_tokens", [2, 1, 3], [10, 900, 5], 2),
        ("total_tokens", [1, 1], [7, 7], 0),
    ],
)
def test_the_replica_with_the_least_takes_the_next(method, requests, tokens, chosen):
    assert ROUTES.load(method)(requests, tokens, 17) == chosen


def test_an_unknown_method_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match="round_robin, total_requests, total_tokens"):
        ROUTES.load("best")
