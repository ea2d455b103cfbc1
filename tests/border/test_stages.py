"""Real runners in a line of stages under the traffic of the border kit: several plans are in the
line at once, and every token, score and hidden state is what the tokens before it make it."""

import dataclasses
import math
import os
from collections import Counter
from dataclasses import dataclass, fields, replace
from random import Random

import msgspec
import pytest

from banyan.kv_cache.sizing import FULL, WINDOW
from banyan.messages.requests import Generate
from banyan.parallel.groups import ALONE
from banyan.runner.forward import EagerForward
from banyan.scheduler.request_table import Slots
from tests.border.build import World, random_world
from tests.border.driver import Play, play, random_actions, smallest
from tests.border.faults import Faults
from tests.border.kit import Answers, Interrupt, Runner
from tests.border.oracle import Story
from tests.border.page_oracle import PageStory
from tests.border.page_runner import COMPILED_PAGE, Shape, bind_ops, build_runner
from tests.border.real_kit import REAL, RealKit, plain_runner
from tests.border.staged_runner import StagedRunner, groups_of_threads

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, ACTIONS_PER_WORLD = int(os.environ.get("STAGED_STEPS", "1200")), 120
MUST_HAPPEN = (
    *("aborts", "copied parts", "evicted pages", "finished by length", "finished by stop"),
    *("flushes", "late masks", "masked rows", "refused joins"),
    *("rejoins with output", "requests for hidden states", "retractions", "scored requests"),
    *("steps side by side", "stops by the front", "turns without a plan", "TakeWeights"),
    "ReleaseMemory",
)


@dataclass(frozen=True)
class StagedWorld(World):
    stages: int = 2
    poison: float = math.nan

    @property
    def shape(self) -> Shape:
        limits = self.core.limits
        slots, length = limits.max_running, limits.max_request_tokens
        return Shape(self.core.groups, slots, length, 0, is_recorded=False, is_pooling=False)


class StagedKit:
    def world(self, random: Random) -> StagedWorld:
        stages = random.choice((2, 2, 3))
        abilities = replace(
            plain_runner().abilities,
            groups=(FULL, WINDOW),
            drafts=False,
            multi_steps=False,
            peers=False,
            vectors=False,
            features=False,
            tiers=("device",),
        )
        world = random_world(random, abilities)
        depth = stages + random.choice((0, 1, 1, 3))
        limits = msgspec.structs.replace(
            world.core.limits,
            depth=depth,
            token_gap=stages - 1,
            micro_batch=random.choice((0, 0, 1, 2)),
        )
        known = {f.name: getattr(world, f.name) for f in fields(World)}
        return StagedWorld(
            **known
            | {
                "core": msgspec.structs.replace(world.core, limits=limits),
                "device": dataclasses.replace(world.device, depth=depth, token_gap=stages - 1),
                "faults": Faults(),
            },
            stages=stages,
            poison=random.choice((math.nan, 1e6)),
        )

    def runner(
        self,
        world: StagedWorld,
        random: Random,
        namespaces: dict[int, bytes],
        interrupt: Interrupt,
        answers: Answers,
    ) -> Runner:
        ops, models = bind_ops(False, COMPILED_PAGE), []
        groups = groups_of_threads(world.stages)

        def keep(model):
            models.append(model)
            return model

        runners = [
            build_runner(world.shape, ops, keep, groups=replace(ALONE, world=mine, stages=mine))
            for mine in groups
        ]
        return StagedRunner(runners, models, groups, world.device, world.poison, random, interrupt)

    def story(self, generate: Generate, world: StagedWorld) -> Story:
        return PageStory(generate, world.shape.windows)

    def adapt(self, random: Random, world: StagedWorld, generate: Generate) -> Generate:
        return RealKit.adapt(REAL, random, world, generate)


STAGED = StagedKit()


def test_stages_with_several_plans_in_their_line_give_the_oracles_answers() -> None:
    seen: Counter[str] = Counter()
    seed = 0
    while seen["steps"] < STEPS:
        seed += 1
        game = play_or_explain(seed)
        seen += game.seen + game.runner.seen
        game.runner.close()
        first, last = game.runner.lines[0], game.runner.lines[-1]
        assert first.turns == last.turns
        if first.ran + last.ran > first.turns:  # so in some turns both have run
            seen["worlds in which stages ran side by side"] += 1
    missing = [what for what in MUST_HAPPEN if not seen[what]]
    assert not missing, f"never happened in {seen['steps']} steps: {missing}; happened: {seen}"
    assert seen["worlds in which stages ran side by side"], seen


def _leaves_slots_at_once(patch: pytest.MonkeyPatch) -> None:
    def release(self: Slots, slot: int) -> None:
        self.free.append(slot)
        self.leaves.append(slot)

    patch.setattr(Slots, "release", release)


def _samples_where_it_ran_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EagerForward, "select", lambda self, batch: None)


@pytest.mark.parametrize("defect", [_leaves_slots_at_once, _samples_where_it_ran_last])
def test_a_line_that_mixes_up_its_plans_is_noticed(monkeypatch, defect) -> None:
    defect(monkeypatch)
    with pytest.raises(Exception, match=r".+"):
        for seed in range(1, 41):
            play(seed, random_actions(Random(seed), ACTIONS_PER_WORLD), kit=STAGED)


def play_or_explain(seed: int) -> Play:
    """Play world `seed`; when it fails, fail with the fewest actions that still do."""
    actions = random_actions(Random(seed), ACTIONS_PER_WORLD)
    try:
        return play(seed, actions, kit=STAGED)
    except Exception as error:
        few = smallest(seed, actions, STAGED)
        raise AssertionError(f"world {seed} fails: {error}\nplay({seed}, {few})") from error
