"""The border kit with the real runner over pages in half precision: pages and steps are the
device's own, attention is by its operators, and steps go through graphs of a few numbers of rows or
are launched anew."""

import dataclasses
import math
from dataclasses import dataclass, fields, replace
from random import Random

import msgspec
import torch

from banyan.kv_cache.sizing import FULL, WINDOW, CacheGroup
from banyan.layers.build import Build
from banyan.messages.requests import Generate
from banyan.model_config.model_config import ModelConfig
from banyan.ops.bind import bind, open_toolkit
from banyan.platform.base import Platform
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from tests.border.build import World, random_world
from tests.border.far_model import HEADS, KV_HEADS, FarModel
from tests.border.far_numbers import LAYERS, LONGEST, FarPrefix
from tests.border.faults import FaultyModel, FaultyOps, Injector
from tests.border.kit import Answers, Interrupt, Runner
from tests.border.oracle import Story
from tests.border.page_drafter import Prompter
from tests.border.page_model import kind_of
from tests.border.page_numbers import UNITS, VOCAB
from tests.border.page_oracle import PageStory
from tests.border.real_kit import REAL, RealKit, plain_runner
from tests.border.real_runner import SPARE, RealRunner

PAGE, SCALE = 128, 8
DTYPE = torch.float16
SHAPES = ((), (1, 2, 4), (2, 3))


@dataclass(frozen=True)
class DeviceWorld(World):
    """
    Attributes:
        head_dim: which way several tokens of several rows attend.
        shapes: rows of the graphs; () = every step is launched anew.
        good_draft: share of the drafts that are right.
    """

    head_dim: int = 16
    shapes: tuple[int, ...] = ()
    poison: float = math.nan
    good_draft: float = 0.5

    @property
    def windows(self) -> tuple[int, ...]:
        others = [group.window for group in self.core.groups[1:]]
        return (0, *others, *[0] * (LAYERS - 1 - len(others)))


class DeviceKit:
    """
    Args:
        platform: opened by `device`, a device of its own.
        dtype: of queries, keys and values as they are computed.
        shapes: worlds have graphs of one of these.
        head_dims: and heads of one of these.
    """

    def __init__(
        self,
        platform: Platform,
        device: torch.device,
        dtype: torch.dtype = DTYPE,
        shapes: tuple[tuple[int, ...], ...] = SHAPES,
        head_dims: tuple[int, ...] = (16, 128),
    ) -> None:
        self._platform = platform
        self._device = device
        self._dtype = dtype
        self._shapes = shapes
        self._head_dims = head_dims
        self.captured = self.eager = 0
        """Runners by how their steps go."""

    def world(self, random: Random) -> DeviceWorld:
        abilities = replace(
            plain_runner(has_drafter=True).abilities,
            groups=(FULL, WINDOW),
            multi_steps=False,
            vectors=False,
            features=False,
        )
        world = random_world(random, abilities, SCALE)
        limits = msgspec.structs.replace(world.core.limits, max_request_tokens=LONGEST)
        groups = tuple(
            CacheGroup(group.kind, PAGE, group.num_pages, group.window)
            for group in world.core.groups
        )
        known = {f.name: getattr(world, f.name) for f in fields(World)}
        return DeviceWorld(
            **known
            | {
                "core": msgspec.structs.replace(world.core, limits=limits, groups=groups),
                "device": dataclasses.replace(world.device, groups=groups),
            },
            head_dim=random.choice(self._head_dims),
            shapes=random.choice(self._shapes),
            poison=random.choice((math.nan, 1e4)),
        )

    def runner(
        self,
        world: DeviceWorld,
        random: Random,
        namespaces: dict[int, bytes],
        interrupt: Interrupt,
        answers: Answers,
    ) -> Runner:
        injector = Injector()
        models: list[FaultyModel] = []
        runner = self._build(world, injector, models, Random(random.random()), answers)
        self.captured += runner.forward.how == "captured"
        self.eager += runner.forward.how == "eager"
        return RealRunner(
            *(runner, models[0], world.device, world.faults, injector, world.poison),
            *(random, interrupt, None, self._platform),
        )

    def _build(
        self,
        world: DeviceWorld,
        injector: Injector,
        models: list[FaultyModel],
        random: Random,
        answers: Answers,
    ) -> ModelRunner:
        limits = world.core.limits
        model_config = ModelConfig(
            path="",
            format="",
            architecture="FarModel",
            model_type="far",
            vocab_size=VOCAB,
            hidden_size=UNITS,
            intermediate_size=0,
            num_layers=LAYERS,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=world.head_dim,
            context_length=LONGEST,
            layer_kinds=tuple(kind_of(window) for window in world.windows),
            window=max(world.windows),
        )
        traits = self._platform.traits
        ops = bind(
            *(traits.name, self._device, self._dtype, traits.features, world.head_dim),
            cache_dtype=DTYPE,
            toolkit=open_toolkit(traits.name, 1, {}),
            page_size=PAGE,
        )
        model = FarModel(model_config, world.windows, self._dtype, self._device, DTYPE)
        models.append(FaultyModel(model, injector))
        sizes = RunnerConfig(
            *(limits.max_running, LONGEST),
            tuple(
                GroupLayout(group.kind, group.window, PAGE, group.num_pages + SPARE)
                for group in world.core.groups
            ),
            shapes=world.shapes,
            draft_room=limits.drafts * limits.max_running,
            verified=1 + limits.drafts if limits.drafts else 0,
        )
        drafter = None
        if limits.drafts:
            drafter = Prompter(answers, random, world.good_draft)
        return ModelRunner(
            *(models[0], Build(FaultyOps(ops, injector), dtype=self._dtype, device=self._device)),
            *(sizes, self._platform),
            open_drafter=None if drafter is None else lambda _: drafter,
        )

    def story(self, generate: Generate, world: DeviceWorld) -> Story:
        return PageStory(generate, world.windows, FarPrefix)

    def adapt(self, random: Random, world: DeviceWorld, generate: Generate) -> Generate:
        """Half of them plain, so that graphs choose their tokens."""
        if random.random() < 0.5:
            return msgspec.structs.replace(generate, grammar="", score_from=-1)
        return RealKit.adapt(REAL, random, world, generate)
