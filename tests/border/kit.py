"""What the driver needs of the runner under test: the seam between one kit and several runners."""

from array import array
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Protocol

from msgspec.structs import replace

from banyan.messages.control_ops import ControlOp
from banyan.messages.plan import (
    TRANSFER_ID_BYTES,
    CopyResult,
    Held,
    Lookup,
    Mask,
    StepPlan,
    StepResult,
)
from banyan.messages.requests import Generate
from tests.border.build import World, random_world, with_peer, with_store
from tests.border.fake_features import random_spans
from tests.border.fake_memory import Stored
from tests.border.fake_runner import ABILITIES, FakeRunner
from tests.border.oracle import Answer, HashStory, Story

Interrupt = Callable[[bool], bool]
"""See `Play._interrupt`."""
Answers = Callable[[], list[Answer]]
"""Of the requests that are alive."""


class Runner(Protocol):
    """A runner whose steps end when the driver says so, in the order of their launch."""

    @property
    def seen(self) -> Counter[str]:
        """What was exercised."""
        ...

    @property
    def failed_seeds(self) -> set[int]:
        """Sampling seeds of requests that a fault may have failed."""
        ...

    @property
    def carried_out(self) -> list[ControlOp]:
        """Orders, in the order in which they took effect."""
        ...

    @property
    def copies_to_report(self) -> int: ...

    @property
    def is_quiet(self) -> bool:
        """No step and no copy is under way."""
        ...

    def launch(self, plan: StepPlan) -> None: ...
    def give_masks(self, masks: list[Mask]) -> None: ...
    def execute(self) -> StepResult:
        """End the oldest step in flight."""
        ...

    def report_copies(self, count: int) -> CopyResult: ...
    def look(self, lookups: list[Lookup]) -> None: ...
    def report_held(self) -> Held | None:
        """The answer to the oldest lookup, if there is one."""
        ...


class Kit(Protocol):
    """One kind of runner, and the worlds that it can be played in."""

    def world(self, random: Random) -> World: ...
    def runner(
        self,
        world: World,
        random: Random,
        namespaces: dict[int, bytes],
        interrupt: Interrupt,
        answers: Answers,
    ) -> Runner: ...
    def story(self, generate: Generate, world: World) -> Story:
        """What a request must answer."""
        ...

    def adapt(self, random: Random, world: World, generate: Generate) -> Generate:
        """A random request as this kind of runner may get it."""
        ...


class FakeKit:
    """The fake runner, which does everything that the border has words for.

    Args:
        stored: pages that outlive the runners of this kit; None for worlds without a store.
    """

    def __init__(self, stored: Stored | None = None) -> None:
        self._stored = stored

    def world(self, random: Random) -> World:
        world = random_world(random, ABILITIES)
        return world if self._stored is None else with_store(random, world)

    def runner(
        self,
        world: World,
        random: Random,
        namespaces: dict[int, bytes],
        interrupt: Interrupt,
        answers: Answers,
    ) -> Runner:
        rules = world.core.store
        has_store = rules is None or rules.is_attached
        runner = FakeRunner(
            *(world.device, world.faults, random, namespaces, self._stored, has_store)
        )
        runner.features.limits, runner.answers = world.core.limits.content, answers
        return runner

    def story(self, generate: Generate, world: World) -> Story:
        return HashStory(generate)

    def adapt(self, random: Random, world: World, generate: Generate) -> Generate:
        """Some prompts are given by content in part; often alike, so that prefixes are found."""
        limits = world.core.limits
        if not limits.content.pool_rows or random.random() < 0.6:
            return generate
        alike, prompt = Random(random.randrange(6)), list(array("i", generate.tokens))
        chunk = limits.chunk_tokens
        prompt, spans, contents = random_spans(alike, prompt, limits.content, chunk)
        tokens = array("i", prompt).tobytes()
        return replace(generate, tokens=tokens, spans=spans, contents=contents)


class PeerKit(FakeKit):
    """The fake runner beside a server that computes prompts."""

    def __init__(self) -> None:
        super().__init__()
        self._rooms = 0
        self._runner: FakeRunner | None = None

    def world(self, random: Random) -> World:
        return with_peer(random_world(random, ABILITIES))

    def runner(
        self,
        world: World,
        random: Random,
        namespaces: dict[int, bytes],
        interrupt: Interrupt,
        answers: Answers,
    ) -> Runner:
        self._runner = FakeRunner(world.device, world.faults, random, namespaces)
        self._runner.features.limits, self._runner.answers = world.core.limits.content, answers
        return self._runner

    def adapt(self, random: Random, world: World, generate: Generate) -> Generate:
        """Most requests have a room."""
        assert self._runner is not None
        generate = super().adapt(random, world, generate)
        if generate.pool or random.random() < 0.2:
            return generate
        self._rooms += 1
        room = self._rooms.to_bytes(TRANSFER_ID_BYTES, "little")
        self._runner.peer.requests[room] = generate
        return replace(generate, transfer_id=room, prefill_address="there:1")


FAKE = FakeKit()
