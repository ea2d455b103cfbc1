"""Joined replicas under the traffic of the border kit: each has its own core, requests and pages,
all agree on every step by the step clock, and share feed-forward blocks and perhaps the logits. One
that has nothing to do goes along, and every token and score is what the tokens before it make it.
"""

import math
import socket
from collections import Counter
from dataclasses import dataclass, fields, replace
from random import Random

import pytest

from banyan.dp_attention.batch import DPAttentionBatch, DPAttentionRows, DPAttentionStep
from banyan.dp_attention.step_clock import LocalPeer, StepClock
from banyan.kv_cache.sizing import FULL, WINDOW
from banyan.messages.plan import Row, StepLoad
from banyan.messages.requests import Generate
from banyan.parallel.groups import Group, Groups
from banyan.runner.batch import Batch
from banyan.runner.runner import ModelRunner
from tests.border.build import World, random_world
from tests.border.driver import Play, random_actions
from tests.border.faults import Faults
from tests.border.joined_runner import Company, JoinedRunner
from tests.border.kit import Answers, Interrupt, Runner
from tests.border.oracle import Story
from tests.border.page_drafter import Prompter
from tests.border.page_oracle import PageStory
from tests.border.page_runner import COMPILED_PAGE, Shape, bind_ops, build_runner
from tests.border.real_kit import REAL, RealKit, plain_runner
from tests.border.staged_runner import groups_of_threads

pytestmark = pytest.mark.usefixtures("one_thread")
SHARE, ACTIONS_PER_WORLD = 25, 120
"""Of the steps that the runner plays by itself."""
REPLICAS = 2
LEAST = 800
"""That all of this happens in."""
MUST_HAPPEN = (
    *("accepted drafts", "rejected drafts"),
    *("aborts", "copied parts", "evicted pages", "finished by length", "finished by stop"),
    *("held for peers", "idle peer steps", "late results", "masked rows", "refused joins"),
    *("rejoins with output", "requests for hidden states", "retractions", "scored requests"),
    *("worlds with heads apart", "worlds with shared heads"),
)


@dataclass(frozen=True)
class JoinedWorld(World):
    replicates_lm_head: bool = False
    poison: float = math.nan

    @property
    def shape(self) -> Shape:
        limits = self.core.limits
        slots, length = limits.max_running, limits.max_request_tokens
        drafts = self.core.limits.drafts
        return Shape(self.core.groups, slots, length, 0, False, False, drafts=drafts)


class Clock:
    """One replica's end of the step clock, as the driver goes by it."""

    def __init__(self, clock: StepClock, company: Company) -> None:
        self.is_pending = False
        self._clock = clock
        self._company = company

    def agree(self, load: StepLoad) -> list[StepLoad] | None:
        self._clock.receive()
        loads = self._clock.agree(load)
        self.is_pending = loads is None
        return loads

    def wait(self) -> None:
        for game in self._company.plays:
            if game.peers is not self:
                game.act(("launch", 1))
                game.act(("complete", 1))


class JoinedKit:
    """The replicas of one game, which are made one after another."""

    def __init__(self) -> None:
        self.company = Company()
        self._threads = groups_of_threads(REPLICAS)

    def world(self, random: Random) -> JoinedWorld:
        abilities = replace(
            plain_runner().abilities,
            groups=(FULL, WINDOW),
            drafts=True,
            multi_steps=False,
            vectors=False,
            features=False,
            tiers=("device",),
        )
        world = random_world(random, abilities)
        known = {f.name: getattr(world, f.name) for f in fields(World)}
        return JoinedWorld(
            **known | {"faults": Faults(), "has_peers": True},
            replicates_lm_head=random.random() < 0.5,
            poison=random.choice((math.nan, 1e6)),
        )

    def runner(
        self,
        world: JoinedWorld,
        random: Random,
        namespaces: dict[int, bytes],
        interrupt: Interrupt,
        answers: Answers,
    ) -> Runner:
        number, models = len(self.company.runners), []

        def keep(model):
            models.append(model)
            return model

        joint = DPAttentionBatch(number, REPLICAS, 1, has_outputs=not world.replicates_lm_head)
        groups = Groups.of_replicas(Group(), self._threads[number], joint, False)
        groups = groups.with_heads_apart() if world.replicates_lm_head else groups
        drafter = None
        if world.core.limits.drafts:
            drafter = Prompter(answers, Random(random.random()), random.choice((0.5, 0.9)))
        ops = bind_ops(False, COMPILED_PAGE)
        runner = build_runner(world.shape, ops, keep, drafter=drafter, groups=groups)
        return JoinedRunner(
            *(runner, models[0], world.device, world.poison, self.company, random, interrupt)
        )

    def story(self, generate: Generate, world: JoinedWorld) -> Story:
        return PageStory(generate, world.shape.windows)

    def adapt(self, random: Random, world: JoinedWorld, generate: Generate) -> Generate:
        return RealKit.adapt(REAL, random, world, generate)


def play_joined(seed: int) -> list[Play]:
    """One game of several replicas to its end; some of them have long times without work."""
    kit, random = JoinedKit(), Random(seed)
    games = kit.company.plays
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peers = map(LocalPeer, ends)
    clocks = [StepClock(at, {1 - at: end}, timeout_s=60.0) for at, end in enumerate(peers)]
    try:
        for clock in clocks:
            games.append(Play(seed, None, kit, Clock(clock, kit.company)))
        shares = random.choice(((1, 1), (1, 9), (9, 1)))
        for action in random_actions(random, ACTIONS_PER_WORLD * REPLICAS, orders=0):
            at = random.choices((0, 1), shares)[0]
            games[at].act(action)
        for round_ in range(20_000):
            if all(game.core.is_idle and game.runner.is_quiet for game in games):
                break
            game = games[round_ // 3 % REPLICAS]
            game.act((("launch", "complete", "copies")[round_ % 3], round_))
        for game in games:
            game.finish()
    except Exception as error:
        raise AssertionError(f"world {seed} fails: {error}") from error
    finally:
        for runner in kit.company.runners:
            runner.close()
        for clock in clocks:
            clock.close()
    return games


def test_joined_replicas_give_the_oracles_answers(request) -> None:
    steps = max(LEAST, request.config.getoption("--real-border-steps") // SHARE)
    seen: Counter[str] = Counter()
    seed = 0
    while seen["steps"] < steps:
        seed += 1
        for game in play_joined(seed):
            seen += game.seen + game.runner.seen
            are_apart = game.world.replicates_lm_head
            seen["worlds with heads apart" if are_apart else "worlds with shared heads"] += 1
    missing = [what for what in MUST_HAPPEN if not seen[what]]
    assert not missing, f"never happened in {seen['steps']} steps: {missing}; happened: {seen}"


def _takes_the_rows_of_another(patch: pytest.MonkeyPatch) -> None:
    def enter(self: DPAttentionRows, counts: list[int]) -> None:
        true_enter(self, counts)
        self.table[0] = 0

    true_enter = DPAttentionRows.enter
    patch.setattr(DPAttentionRows, "enter", enter)


def _runs_as_many_tokens_as_it_has(patch: pytest.MonkeyPatch) -> None:
    """Where rows have fewer drafts than was agreed."""
    build = ModelRunner._build_batch

    def cut(
        self: ModelRunner, rows: list[Row], in_multi_step: bool
    ) -> tuple[Batch, dict[int, str]]:
        batch, failed = build(self, rows, in_multi_step)
        kept = [at for at in range(len(batch.rows)) if batch.indices[at] < len(rows)]
        good = [(int(batch.indices[at]), batch.rows[at]) for at in kept]
        return Batch.of(good), failed

    patch.setattr(ModelRunner, "_build_batch", cut)


def _counts_others_as_its_own(patch: pytest.MonkeyPatch) -> None:
    begin = DPAttentionStep.begin
    patch.setattr(DPAttentionStep, "begin", lambda self, loads: begin(self, loads[::-1]))


@pytest.mark.parametrize(
    "defect",
    [_takes_the_rows_of_another, _counts_others_as_its_own, _runs_as_many_tokens_as_it_has],
)
def test_a_joint_step_that_mixes_up_its_replicas_is_noticed(monkeypatch, defect) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError, match=r"world \d+ fails"):
        for seed in range(1, 41):
            play_joined(seed)
