"""Pins amid random traffic: they stay, end, are let go and give way as they should; and a cache
that breaks one of these rules is noticed."""

from collections import Counter
from collections.abc import Callable

import pytest

from banyan.kv_cache import pins
from banyan.kv_cache.eviction import EVICTION
from banyan.kv_cache.pins import Pins
from banyan.kv_cache.radix_tree import CachedPages
from tests.border.pinned import pin_verdict, play_pins

WORLDS = range(1, 31)
HAPPENS = ("pins", "unpins", "ends of pins", "refused pins", "pins that gave way", "evicted pages")


def test_pinned_prompts_stay_amid_random_traffic_and_no_longer_than_they_should() -> None:
    seen: Counter[str] = Counter()
    policies: set[str] = set()
    for seed in WORLDS:
        game = play_pins(seed)
        seen += game.seen
        policies.add(game.world.core.eviction)
    missing = [what for what in HAPPENS if not seen[what]]
    assert not missing, f"never happened: {missing}; happened: {dict(seen)}"
    assert policies == set(EVICTION.names())


def no_locks(patch: pytest.MonkeyPatch) -> None:
    add, remove = Pins.add, Pins.remove

    def without(method: Callable[..., object]) -> Callable[..., object]:
        def run(self: Pins, *message: object) -> object:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(CachedPages, "lock", lambda tree, node, group: None)
                inner.setattr(CachedPages, "unlock", lambda tree, node, group, epoch: None)
                return method(self, *message)

        return run

    patch.setattr(Pins, "add", without(add))
    patch.setattr(Pins, "remove", without(remove))


def no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pins, "expire", lambda self, now: None)
    patch.setattr(Pins, "alive", lambda self, now: list(self.by_name.values()))


def too_many(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pins, "_SHARE", 1)


def never_let_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pins, "unpin", lambda self, name="": None)


def locks_that_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pins, "remove", lambda self, name: self.by_name.pop(name, None) is not None)


DEFECTS = (
    (no_locks, "may be evicted"),
    (no_end, "pinned too long"),
    (too_many, "pages are pinned"),
    (never_let_go, "pinned too long"),
    (locks_that_stay, "leaks|no progress|stuck|out_of_pages|fits"),
)


@pytest.mark.parametrize(("defect", "verdict"), DEFECTS, ids=lambda v: getattr(v, "__name__", ""))
def test_a_cache_that_breaks_a_promise_is_noticed(
    defect: Callable[[pytest.MonkeyPatch], None], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pin_verdict(lambda: defect(monkeypatch), WORLDS)
    assert any(word in found for word in verdict.split("|")), found
