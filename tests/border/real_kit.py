"""The worlds of the real runner: those that it says it can live in."""

import math
from array import array
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from random import Random

import msgspec

from banyan.kv_cache.cache import TOKEN_BYTES
from banyan.kv_cache.sizing import FULL, CacheGroup
from banyan.kv_transfer.store import identity
from banyan.messages.requests import Generate
from banyan.ops.api import Ops
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import Abilities
from tests.border.build import World, random_world, with_store
from tests.border.fake_features import random_spans
from tests.border.faults import FaultyModel, FaultyOps, Injector
from tests.border.kit import Answers, Interrupt, Runner
from tests.border.oracle import VOCAB, Story
from tests.border.page_drafter import Prompter
from tests.border.page_model import PageModel
from tests.border.page_oracle import PageStory
from tests.border.page_runner import COMPILED_PAGE, Shape, bind_ops, build_runner
from tests.border.real_runner import SPARE, RealRunner
from tests.border.real_store import Shelf

RECORDED_SCALE = 4
"""The compiled kernels read pages of COMPILED_PAGE tokens, so everything is larger by this."""


@dataclass(frozen=True)
class RealWorld(World):
    """
    Attributes:
        is_recorded: compiled ops and recorded steps; else torch's ops.
        is_pooling: served for vectors.
        poison: what pages hold that nobody has written.
        good_draft: share of the drafts that are right.
        branches: drafts are trees.
    """

    is_recorded: bool = False
    is_pooling: bool = False
    poison: float = math.nan
    good_draft: float = 0.8
    branches: bool = False

    @property
    def shape(self) -> Shape:
        return Shape(
            self.core.groups,
            self.core.limits.max_running,
            self.core.limits.max_request_tokens,
            SPARE,
            self.is_recorded,
            self.is_pooling,
            self.core.limits.drafts,
            self.core.limits.multi_step,
            self.branches,
            self.core.limits.draft_levels,
            blocks=self.core.limits.content.towers[0].blocks if self.abilities.features else 0,
        )


@dataclass(frozen=True)
class RealKit:
    """
    Args:
        recorded: share of the worlds with compiled ops and recorded steps.
        stored: folder of pages that outlive the runners; None for worlds without a store.
        branches: drafts of every row, all of which branch; 0 = worlds of all kinds.
        levels: of the trees, where a model drafts them beside the one that answers; 0 = what drafts
            knows most answers.
    """

    recorded: float = 0.75
    stored: Path | None = None
    branches: int = 0
    levels: int = 0

    def world(self, random: Random) -> RealWorld:
        is_recorded = random.random() < self.recorded
        is_pooling = random.random() < 0.1 and not self.branches
        poison = random.choice((math.nan, math.nan, 1e6))
        scale = RECORDED_SCALE if is_recorded else 1
        abilities = replace(_abilities(is_pooling), multi_steps=is_recorded and not is_pooling)
        world = random_world(random, abilities, scale)
        while self.branches and not world.core.limits.drafts:
            world = random_world(random, abilities, scale)
        if self.branches:
            limits = msgspec.structs.replace(
                world.core.limits, drafts=self.branches, fixed_drafts=True
            )
            limits = msgspec.structs.replace(
                limits,
                drafts=self.branches,
                fixed_drafts=True,
                paid_drafts=self.levels > 0,
                draft_levels=self.levels,
            )
            core, device = msgspec.structs.replace(world.core, limits=limits), world.device
            world = replace(world, core=core, device=replace(device, drafts=self.branches))
        if self.stored is not None:
            world = with_store(random, world)
        known = {f.name: getattr(world, f.name) for f in fields(World)}
        return RealWorld(
            **known,
            is_recorded=is_recorded,
            is_pooling=is_pooling,
            poison=poison,
            good_draft=0.9 if self.branches else random.choice((0.0, 0.5, 0.8, 1.0)),
            branches=random.random() < 0.5 or bool(self.branches),
        )

    def runner(
        self,
        world: RealWorld,
        random: Random,
        namespaces: dict[int, bytes],
        interrupt: Interrupt,
        answers: Answers,
    ) -> Runner:
        injector = Injector()
        ops = FaultyOps(_ops(world.is_recorded), injector)
        drafter = None
        if world.core.limits.drafts:
            mine = Random(random.random())
            drafter = Prompter(answers, mine, world.good_draft, world.branches)
        models: list[FaultyModel] = []

        def wrap(model: PageModel) -> FaultyModel:
            models.append(FaultyModel(model, injector))
            return models[0]

        shelf = None
        if self.stored is not None:  # pages of other worlds have other shapes
            name = identity([world.shape]).hex()
            rules = world.core.store
            shelf = Shelf(
                self.stored / name, world.faults, random, bool(rules and rules.is_attached)
            )
        open_mover = None if shelf is None else shelf.open_mover
        runner = build_runner(world.shape, ops, wrap, open_mover, drafter)
        return RealRunner(
            *(runner, models[0], world.device, world.faults, injector, world.poison),
            *(random, interrupt, shelf),
        )

    def story(self, generate: Generate, world: RealWorld) -> Story:
        return PageStory(generate, world.shape.windows)

    def adapt(self, random: Random, world: RealWorld, generate: Generate) -> Generate:
        """Real sampling: greedy or at a temperature, with filters."""
        sampling = msgspec.structs.replace(
            generate.sampling,
            temperature=random.choice((0.0, 0.0, 0.7, 1.5)),
            top_k=random.choice((-1, -1, 5)),
            top_p=random.choice((1.0, 1.0, 0.9)),
            min_p=random.choice((0.0, 0.0, 0.05)),
            frequency_penalty=random.choice((0.0, 0.0, 0.0, 0.5)),
            presence_penalty=random.choice((0.0, 0.0, 0.0, -0.5)),
            repetition_penalty=random.choice((1.0, 1.0, 1.0, 1.25)),
            logit_bias=random.choice(({}, {}, {}, {5: 2.0, 11: -1.0})),
        )
        if sampling.max_new_tokens and random.random() < 0.01:  # nothing may be chosen
            everything = tuple(range(VOCAB))
            sampling = msgspec.structs.replace(sampling, stop_ids=everything, min_new_tokens=1)
        tokens = generate.tokens
        if random.random() < 0.02:  # the runner cannot take it, and nobody else shall notice
            tokens = tokens[:-TOKEN_BYTES] + array("i", [VOCAB + 3]).tobytes()
        generate = msgspec.structs.replace(generate, sampling=sampling, tokens=tokens)
        return _with_contents(world, generate) if world.abilities.features else generate


def _with_contents(world: World, generate: Generate) -> Generate:
    """Some prompts are given by content in part; often alike, so that prefixes are found."""
    prompt, own = list(array("i", generate.tokens)), Random(generate.sampling.seed)
    if prompt[-1] >= VOCAB or own.random() < 0.6:
        return generate
    limits, alike = world.core.limits, Random(own.randrange(6))
    prompt, spans, contents = random_spans(
        alike, prompt, limits.content, limits.chunk_tokens, may_be_mutual=False
    )
    tokens = array("i", prompt).tobytes()
    return msgspec.structs.replace(generate, tokens=tokens, spans=spans, contents=contents)


@cache
def _ops(is_recorded: bool) -> Ops:
    return bind_ops(is_recorded, COMPILED_PAGE)


def plain_runner(is_pooling: bool = False, has_drafter: bool = False) -> ModelRunner:
    """A runner of one slot and one page."""
    groups = (CacheGroup(FULL, COMPILED_PAGE, 2),)
    drafter = Prompter(list, Random(0), 0.0) if has_drafter else None
    shape = Shape(groups, 1, 8, 0, False, is_pooling, blocks=1)
    return build_runner(shape, _ops(False), drafter=drafter)


@cache
def _abilities(is_pooling: bool) -> Abilities:
    return plain_runner(is_pooling, has_drafter=True).abilities


REAL = RealKit()
