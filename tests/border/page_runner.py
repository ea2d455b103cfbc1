"""The one place that makes a real ModelRunner for the border kit."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from banyan.kv_cache.sizing import CacheGroup
from banyan.layers.build import Build
from banyan.model_config.model_config import LAST, STATE, ModelConfig, Pooling
from banyan.ops.api import Ops
from banyan.ops.bind import NO_TOOLKIT, bind, open_toolkit
from banyan.parallel.groups import ALONE, Groups
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from banyan.runner.speculative import Drafter
from banyan.runner.speculative.draft_runner import DraftModel, DraftRunner
from banyan.runner.speculative.standalone import ModelDrafter
from banyan.runner.speculative.tree_growth import Grower
from tests.border.page_features import PageTower
from tests.border.page_model import HEAD_DIM, HEADS, KV_HEADS, PageModel, kind_of
from tests.border.page_numbers import LAYERS, STATEFUL, UNITS, VOCAB

CPU = torch.device("cpu")
COMPILED_PAGE = 16
"""The smallest page that the compiled attention reads."""
BREADTH, CERTAINTY = 2, 6.0
"""Ways in which a draft model goes on behind a token, and how sure of them it is: the trees of one
that is not are wide and near."""
DRAFT_ROOM = 5
"""Small enough that some steps verify more than what was recorded holds."""


@dataclass(frozen=True)
class Shape:
    """What differs between one real runner and the next.

    Attributes:
        groups: the cache groups that the engine plans with: a full one, and perhaps others.
        spare: pages of each group that the engine does not know.
        is_recorded: compiled ops and recorded steps; else torch's ops, the model called each time.
        is_pooling: served for vectors instead of text.
        drafts: drafted after each sampled token.
        burst: decode steps of one plan.
        branches: drafts are trees.
        levels: of trees that a model like the one that answers drafts, over pages of its own; 0 =
            no model drafts.
        blocks: of the tower that makes features; 0 = prompts are tokens.
    """

    groups: tuple[CacheGroup, ...]
    slots: int
    max_length: int
    spare: int
    is_recorded: bool
    is_pooling: bool
    drafts: int = 0
    multi_step: int = 1
    branches: bool = False
    levels: int = 0
    blocks: int = 0

    @property
    def windows(self) -> tuple[int, ...]:
        """By layer: the first sees everything, the others are of what else there is."""
        others = [STATEFUL if g.kind == STATE else g.window for g in self.groups[1:]]
        return (0, *others, *[0] * (LAYERS - 1 - len(others)))


def bind_ops(is_recorded: bool, page_size: int) -> Ops:
    return bind(
        *("cpu", CPU, torch.float32, frozenset(), HEAD_DIM),
        exact=True,
        cache_dtype=torch.float32,
        toolkit=open_toolkit("cpu", 1, {}) if is_recorded else NO_TOOLKIT,
        page_size=page_size,
    )


def build_runner(
    shape: Shape,
    ops: Ops,
    wrap=lambda model: model,
    open_mover=None,
    drafter: Drafter | None = None,
    groups: Groups = ALONE,
) -> ModelRunner:
    model_config = ModelConfig(
        path="",
        format="",
        architecture="PageModel",
        model_type="page",
        vocab_size=VOCAB,
        hidden_size=UNITS,
        intermediate_size=0,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        context_length=shape.max_length,
        layer_kinds=tuple(kind_of(window) for window in shape.windows),
        window=max(shape.windows),
        pooling=Pooling(LAST, normalize=False) if shape.is_pooling else None,
    )
    tower = PageTower(shape.blocks) if shape.blocks else None
    model = wrap(PageModel(model_config, ops, shape.windows, groups, tower=tower))
    layouts = tuple(
        GroupLayout(group.kind, group.window, group.page_tokens, group.num_pages + shape.spare)
        for group in shape.groups
    )
    sizes = RunnerConfig(
        *(shape.slots, shape.max_length, layouts, 48 if shape.is_recorded else 0),
        draft_room=DRAFT_ROOM if shape.drafts else 0,
        multi_step=shape.multi_step,
        branching=shape.drafts + 1 if shape.branches else 0,
    )
    draft, open_drafter = None, None if drafter is None else lambda _: drafter
    if shape.levels:
        its = PageModel(model_config, ops, shape.windows, groups, CERTAINTY)
        draft = DraftModel(its, Build(ops, groups))
        open_drafter = partial(_open_drafter, shape)
    runner = ModelRunner(model, Build(ops, groups), sizes, None, open_mover, open_drafter, draft)
    assert runner.forward.is_recorded == shape.is_recorded
    return runner


def _open_drafter(shape: Shape, open_draft_runner: Callable[[], DraftRunner]) -> ModelDrafter:
    draft_runner = open_draft_runner()
    return ModelDrafter(draft_runner, Grower(draft_runner, BREADTH, shape.levels))
