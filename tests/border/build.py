"""Random worlds: cache geometry, limits and faults, small enough that everything runs short."""

import dataclasses
from dataclasses import dataclass
from random import Random
from typing import Protocol

from msgspec.structs import replace

from banyan.disaggregation.scheduling import DECODE
from banyan.dp_attention.step_clock import StepAgreement
from banyan.engine.core import CoreRecorder, EngineCore
from banyan.engine.core_spec import CoreSpec
from banyan.grammar.base import Grammar
from banyan.kv_cache.hierarchical_cache import (
    WRITE_BACK,
    WRITE_SELECTIVE,
    WRITE_THROUGH,
    StoreRules,
)
from banyan.kv_cache.sizing import FULL, STATE, WINDOW, CacheGroup
from banyan.messages.plan import StepLoad
from banyan.messages.spans import ContentKind
from banyan.runner.runner_config import Abilities
from banyan.scheduler.budget import Priorities, SchedulerLimits
from banyan.scheduler.hicache_fetch import BEST_EFFORT, TIMEOUT, WAIT_COMPLETE
from banyan.scheduler.spans import ContentLimits, TowerWork
from tests.border.faults import Faults
from tests.border.laws import Device
from tests.border.oracle import HashGrammar

PAGE = 4
KINDS = ("full", "full", "full+window", "full+state", "full+window+state")


@dataclass(frozen=True)
class World:
    """What one run of the border kit is played in.

    Attributes:
        abilities: of the runner; requests and plans ask for nothing else.
        scale: how many times as large pages, prompts and pieces of prompts are.
        has_hidden: some requests want hidden states.
    """

    core: CoreSpec
    device: Device
    faults: Faults
    has_peers: bool
    abilities: Abilities
    scale: int = 1
    has_hidden: bool = False


def random_world(random: Random, abilities: Abilities, scale: int = 1) -> World:
    """A world that asks for no more than `abilities`."""
    depth = random.choice((1, 2, 2, 3))
    kind = random.choice([k for k in KINDS if set(k.split("+")) <= set(abilities.groups)])
    may_draft = abilities.drafts and (abilities.goes_back or "state" not in kind)
    drafts = random.choice((0, 0, 1, 3)) if may_draft else 0
    multi_step = random.choice((1, 2, 5)) if abilities.multi_steps and not drafts else 1
    limits = SchedulerLimits(
        max_running=random.choice((1, 3, 6)),
        chunk_tokens=random.choice((3 * scale, 8 * scale, 16 * scale, 1 << 30)),
        max_prompts=random.choice((0, 0, 1, 2)),
        max_request_tokens=40 * scale,
        depth=depth,
        max_queued=random.choice((0, 0, 12)),
        token_gap=random.choice((0, 1)) if depth == 3 else 0,
        drafts=drafts,
        multi_step=multi_step,
        conservativeness=random.choice((0.3, 1.0)),
        priorities=Priorities(
            are_honoured=random.random() < 0.8,
            low_first=random.random() < 0.2,
            preemption_gap=random.choice((0, 1, 3)),
        ),
    )
    groups = tuple(_groups(random, kind, scale))
    if abilities.features:
        seed = limits.max_running * groups[0].num_pages + depth  # other draws stay what they were
        limits = replace(limits, content=_content_limits(Random(seed)))
    core = CoreSpec(
        groups=groups,
        limits=limits,
        order=random.choice(("fcfs", "lpm", "dfs-weight", "lof", "random")),
        eviction=random.choice(("lru", "lfu", "fifo", "priority")),
        share=random.random() < 0.9,
    )
    device = Device(
        *(groups, limits.max_running, depth, limits.token_gap, drafts, limits.chunk_tokens),
        multi_step,
    )
    quiet = random.random() < 0.4
    faults = Faults() if quiet else Faults(row=0.01, step=0.01, copy=0.1, order=0.1)
    has_peers = random.random() < 0.15 and abilities.peers and multi_step == 1
    has_hidden = random.random() < 0.3 and abilities.hidden
    return World(core, device, faults, has_peers, abilities, scale, has_hidden)


def with_store(random: Random, world: World) -> World:
    """The same world with a store, which may be attached later. `now` goes on by 0.01 with every
    action."""
    share = replace(
        world.core,
        share=True,
        groups=world.core.groups[:1],
        store=StoreRules(
            write=random.choice((WRITE_THROUGH, WRITE_THROUGH, WRITE_SELECTIVE, WRITE_BACK)),
            prefetch=random.choice((BEST_EFFORT, WAIT_COMPLETE, TIMEOUT)),
            threshold=random.choice((0, 0, 2 * PAGE * world.scale)),
            timeout_s=random.choice((0.03, 0.3, 3.0)),
            max_writes=random.choice((2, 64)),
            is_attached=random.random() < 0.8,
        ),
    )
    device = dataclasses.replace(world.device, groups=share.groups)
    return dataclasses.replace(world, core=share, device=device)


def with_peer(world: World) -> World:
    """The same world on a server that continues prompts; hidden states are not handed over."""
    groups = tuple(group for group in world.core.groups if group.kind != STATE)
    core = replace(world.core, groups=groups, role=DECODE)
    device = dataclasses.replace(world.device, groups=groups)
    return dataclasses.replace(world, core=core, device=device, has_hidden=False)


def _content_limits(random: Random) -> ContentLimits:
    return ContentLimits(
        pool_rows=random.choice((9, 12, 20, 100)),
        towers=(
            TowerWork(
                ContentKind.PATCHES,
                blocks=random.choice((1, 3, 8)),
                patch_work=random.choice((0, 1, 2)),
                pair_work=random.choice((0, 1)),
            ),
        ),
        token_work=random.choice((1, 4)),
    )


def _groups(random: Random, kind: str, scale: int) -> list[CacheGroup]:
    pages, page = random.choice((12, 20, 40)), PAGE * scale
    found = [CacheGroup(FULL, page, pages)]
    if "window" in kind:
        window = random.choice((3, 6, 9)) * scale
        size = random.choice((2, PAGE)) if scale == 1 else page
        found.append(CacheGroup(WINDOW, size, pages + 8, window))
    if "state" in kind:
        found.append(CacheGroup(STATE, random.choice((page, 2 * page)), random.choice((8, 16))))
    return found


def build_core(
    world: World, lockstep: StepAgreement | None, recorder: CoreRecorder | None
) -> EngineCore:
    return world.core.build(compile_grammar, lockstep, recorder)


def compile_grammar(text: str) -> Grammar:
    assert text == "hash:", text
    return HashGrammar()


class Peers(StepAgreement, Protocol):
    """Replicas beside the one that is played."""

    @property
    def is_pending(self) -> bool:
        """They have yet to answer."""
        ...

    def wait(self) -> None:
        """Let them do something about it."""
        ...


class RandomPeers:
    """Another replica that has work now and then, and may take its time to say so.

    Where rows have drafts it answers at once: a row's start is a bound by the drafts in flight when
    it is planned, and its plan must not wait for their results.
    """

    def __init__(self, random: Random, is_quick: bool) -> None:
        self._random = random
        self._is_quick = is_quick
        self._offered: StepLoad | None = None
        self.is_pending = False

    def wait(self) -> None:
        """They answer when they like."""

    def agree(self, load: StepLoad) -> list[StepLoad] | None:
        assert self._offered in (None, load), "another load than the one that is held"
        other = self._random.randrange(1, 4) if self._random.random() < 0.2 else 0
        if not load.tokens and not other and not self.is_pending:
            return []
        self.is_pending = not self._is_quick and self._random.random() < 0.3
        self._offered = load if self.is_pending else None
        if self.is_pending:
            return None
        return [load, StepLoad(other or int(not load.tokens), other)]
