"""A real ModelRunner whose pages hold poison from when the plan that grants them begins until a row
has computed them, and after every order that changes what they mean."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from banyan.base.ids import PADDING_PAGE
from banyan.messages.control_ops import (
    KV_CACHE,
    WEIGHTS,
    ControlOp,
    ReleaseMemory,
    ResumeMemory,
    StopProfile,
    TakeWeights,
)
from banyan.messages.plan import StepPlan
from banyan.models.base import Model
from banyan.runner.control_ops import ControlOpExecutor, Finish, RankReply
from banyan.runner.runner import ModelRunner
from tests.border.laws import Device
from tests.border.page_numbers import LAYERS


def poisoned(
    runner: ModelRunner,
    model: Model,
    device: Device,
    poison: float,
    on_order: Callable[[ControlOp], None] | None,
) -> ControlOpExecutor:
    """What takes the orders of `runner`, which is fresh.

    Args:
        model: that it has.
        on_order: called with each order that is carried out.
    """
    groups = range(len(device.groups))

    def pages(group: int) -> list[Tensor]:
        store = runner.store
        here = {cache.layer for cache in store.caches}
        layers = [at for at in range(LAYERS) if at in here and store.group_of(at) == group]
        return [found for layer in layers for found in store.tensors(layer).values()]

    def spoil_all() -> None:
        for group in groups:
            for found in pages(group):
                found.fill_(poison)

    def begin(plan: StepPlan, carry=None):
        """Pages that no row has computed hold nothing, whatever lay there before."""
        starts = {row.slot: row.start for row in plan.rows}
        for grant in plan.grants:
            size = device.groups[grant.group].page_tokens
            fresh = [
                page
                for index, page in enumerate(grant.pages, grant.first)
                if index * size >= starts[grant.slot] and page != PADDING_PAGE
            ]
            for tensor in pages(grant.group) if fresh else ():
                tensor[fresh] = poison
        return true_begin(plan, carry)

    def obey(order: ControlOp) -> RankReply:
        """After other weights, or without memory, no page holds what it held."""
        tags = order.tags if isinstance(order, ReleaseMemory | ResumeMemory) else []
        if isinstance(order, ReleaseMemory):
            if KV_CACHE in tags:
                runner.store.release()
            if WEIGHTS in tags and runner.model is not None:
                runner.drop_model()
        elif isinstance(order, TakeWeights) or (WEIGHTS in tags and runner.model is None):
            runner.take_model(model)
        if isinstance(order, TakeWeights | ReleaseMemory) and tags != [WEIGHTS]:
            spoil_all()
        if on_order is not None:
            on_order(order)
        return RankReply("done")

    def prepare(order: ControlOp) -> Finish:
        return partial(obey, order)

    true_begin, runner.begin = runner.begin, begin
    spoil_all()
    kinds = (TakeWeights, ReleaseMemory, ResumeMemory, StopProfile)
    return ControlOpExecutor(runner, dict.fromkeys(kinds, prepare))
