"""Worlds in which requests leave pins behind, every order of eviction is played, and what stays,
goes and gives way is held against a model that knows names, times and prompts alone.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import msgspec

from banyan.base.ids import RequestId
from banyan.kv_cache.eviction import EVICTION
from banyan.messages.events import Event, Failed, Finished
from banyan.messages.requests import Generate, Unpin
from tests.border.build import World
from tests.border.driver import Action, Play, random_actions
from tests.border.kit import FakeKit
from tests.border.laws import require

_NUMBERS = {
    "slru": {"protected_threshold": 1},
    "tlru": {"threshold": 12, "next_prompt_estimate": 3},
}
UNPINS = 0.06
"""Share of the actions that let a pin go."""


class PinKit(FakeKit):
    """The fake runner; two in five requests for text stay pinned for a while."""

    def world(self, random: Random) -> World:
        world = super().world(random)
        policy = random.choice(EVICTION.names())
        core = msgspec.structs.replace(
            world.core, share=True, eviction=policy, eviction_numbers=_NUMBERS.get(policy, {})
        )
        return replace(world, core=core, has_peers=False)

    def adapt(self, random: Random, world: World, generate: Generate) -> Generate:
        if generate.pool or random.random() < 0.6:
            return generate
        seconds, priority = random.choice((0.05, 0.4, 3.0)), random.choice((0, 0, 1, 2))
        return msgspec.structs.replace(generate, pin_s=seconds, pin_priority=priority)


@dataclass
class Promise:
    """One pin, as whoever asked for it knows it."""

    until_s: float
    priority: int
    namespace: bytes
    tokens: bytes
    found: int = -1
    """Tokens of it that the cache had when it was made."""


class PinPlay(Play):
    def __init__(self, seed: int) -> None:
        super().__init__(seed, kit=PinKit())
        self.promises: dict[str, Promise] = {}
        self._is_ending = False

    def act(self, action: Action) -> None:
        orders = len(self.replies)
        super().act(action)
        if self._is_ending:
            self._let_all_go()
        self._judge(has_orders=len(self.replies) > orders)

    def finish(self) -> None:
        self._is_ending = True
        self._let_all_go()
        super().finish()

    def _let_all_go(self) -> None:
        self.core.receive(Unpin(), self.now)
        self.promises.clear()

    def _unpin(self, random: Random) -> None:
        name = random.choice([*sorted(self.promises), "", "nobody"])
        self.core.receive(Unpin(RequestId(name)), self.now)
        self.seen["unpins"] += name in self.promises
        for each in [name] if name else list(self.promises):
            self.promises.pop(each, None)

    def _hear(self, events: list[Event]) -> None:
        super()._hear(events)
        for event in events:
            if isinstance(event, Finished) and event.reason != "abort":
                generate = self.clients[event.request].answer.generate
                if generate.pin_s:
                    whole = event.prompt_tokens // self.core.scheduler.cache.block_size
                    size = whole * self.core.scheduler.cache.block_size * array("i").itemsize
                    self.seen["pins"] += 1
                    self.promises[event.request] = Promise(
                        self.now + generate.pin_s,
                        generate.pin_priority,
                        generate.namespace,
                        generate.tokens[:size],
                    )
                    require(bool(whole), f"{event.request} is pinned without a whole page")

    def _failed(self, client: object, event: Failed) -> None:
        if event.code != "not_pinned":
            super()._failed(client, event)  # type: ignore[arg-type]
            return
        self.seen["refused pins"] += 1
        generate = self.clients[event.request].answer.generate
        require(bool(generate.pin_s), f"{event} of a request that asked for no pin")

    def _judge(self, has_orders: bool) -> None:
        cache = self.core.scheduler.cache
        held = {pin.name: pin for pin in cache.pins.alive(self.now)}
        for name in [n for n, p in self.promises.items() if p.until_s <= self.now]:
            del self.promises[name]
            self.seen["ends of pins"] += 1
        if has_orders and not held:
            self.promises.clear()  # other weights, or memory that was released
        while gone := self.promises.keys() - held.keys():
            order = {name: (p.priority, p.until_s) for name, p in self.promises.items()}
            first = min(order, key=lambda name: order[name])
            lowest = {name for name in order if order[name] == order[first]}
            require(bool(gone & lowest), f"{gone} gave way before {first}: {order}")
            del self.promises[min(gone & lowest)]
            self.seen["pins that gave way"] += 1
        require(not held.keys() - self.promises.keys(), f"{held.keys()} are pinned too long")
        for group, pool in enumerate(cache.pools):
            nodes = {node for pin in cache.pins.by_name.values() for node in pin.nodes[group]}
            pages = sum(len(node.pages[group]) for node in nodes)
            require(4 * pages <= pool.total, f"{pages} of {pool.total} pages are pinned")
            require(all(node.locks[group] for node in nodes), "a pinned page may be evicted")
        faults = ("failed steps", "failed rows", "failed copies")
        is_spoiled = any(self.runner.seen[what] for what in faults)
        is_open = bool(cache.states._open)  # of two states the longer may be on its way yet
        for name, promise in self.promises.items():
            limit = len(promise.tokens) // array("i").itemsize
            match = cache.probe(promise.namespace, promise.tokens, limit)
            is_kept = match.tokens >= promise.found or is_spoiled or is_open
            require(is_kept, f"of {name} {match.tokens} tokens are left of {promise.found}")
            is_whole = match.tokens == limit or is_spoiled or cache.has_state
            require(is_whole, f"of {name} {match.tokens} tokens are there of {limit}")
            promise.found = match.tokens if promise.found < 0 else promise.found


def play_pins(seed: int, count: int = 250) -> PinPlay:
    """Play world `seed`; BorderError or AssertionError when something is wrong."""
    random, game = Random(seed), PinPlay(seed)
    for kind, number in random_actions(random, count):
        game.act(("unpin" if random.random() < UNPINS else kind, number))
    game.finish()
    return game


def pin_verdict(break_rule: Callable[[], None], worlds: range) -> str:
    """What the kit says of pins that are broken in one place; "" when it sees nothing."""
    break_rule()
    for seed in worlds:
        try:
            play_pins(seed)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""
