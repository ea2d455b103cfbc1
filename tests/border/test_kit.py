"""The border kit notices broken engines: each test breaks one rule and expects the verdict."""

from collections.abc import Callable
from random import Random

import msgspec
import pytest

from banyan.engine import core
from banyan.engine.core import EngineCore
from banyan.kv_cache import partial_blocks as partial
from banyan.kv_cache.cache import TOKEN_BYTES, KVCache
from banyan.kv_cache.page_pool import NEVER_USED, EpochTracker
from banyan.kv_cache.partial_blocks import PartialBlocks
from banyan.kv_cache.sizing import CacheGroup
from banyan.kv_cache.state_checkpoints import StateCheckpoints
from banyan.messages.control_ops import ControlOpReply
from banyan.messages.plan import StepResult, device_page
from banyan.messages.requests import RunControlOps
from banyan.scheduler.output_processor import OutputProcessor
from banyan.scheduler.request_table import RequestTable, Slots
from banyan.scheduler.row_planner import RowPlanner
from banyan.scheduler.scheduler import Scheduler
from tests.border.driver import play, random_actions

WORLDS = range(1, 60)


def verdict(break_rule: Callable[[pytest.MonkeyPatch], None]) -> str:
    """What the kit says of an engine that is broken in one place; "" when it sees nothing."""
    with pytest.MonkeyPatch.context() as patch:
        break_rule(patch)
        for seed in WORLDS:
            try:
                play(seed, random_actions(Random(seed), 250))
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return ""


def test_pages_given_out_while_steps_still_use_them_are_noticed() -> None:
    found = verdict(
        lambda patch: patch.setattr(EpochTracker, "has_passed", lambda self, epoch: True)
    )
    assert "rewritten while in use" in found or "still" in found


def test_pages_of_a_failed_step_that_stay_shared_are_noticed() -> None:
    found = verdict(
        lambda patch: patch.setattr(KVCache, "forget_promises", lambda self, step, writer="": [])
    )
    assert "known to have spoiled" in found or "is right" in found


def test_window_pages_dropped_one_token_early_are_noticed() -> None:
    slide = KVCache.slide
    found = verdict(
        lambda patch: patch.setattr(
            KVCache, "slide", lambda self, lease, lowest: slide(self, lease, lowest + 1)
        )
    )
    assert "is padding" in found or "rewritten while in use" in found


def test_a_window_prefix_matched_one_page_short_is_noticed() -> None:
    found = verdict(
        lambda patch: patch.setattr(CacheGroup, "first_read", lambda self, start: start)
    )
    assert found


def test_a_row_that_does_not_keep_the_token_gap_is_noticed() -> None:
    found = verdict(
        lambda patch: patch.setattr(RowPlanner, "_gap_is_over", lambda self, request, draft: True)
    )
    assert "needs a token of" in found


def test_more_steps_in_flight_than_the_depth_are_noticed() -> None:
    found = verdict(lambda patch: patch.setattr(EngineCore, "in_flight", 0))
    assert "steps in flight, one more launched" in found


def test_a_mask_that_never_comes_is_noticed() -> None:
    found = verdict(
        lambda patch: patch.setattr(OutputProcessor, "_release_mask", lambda self, request: None)
    )
    assert "no mask came before sampling" in found


def test_a_slot_that_is_left_twice_is_noticed() -> None:
    give = Slots.release

    def twice(self: Slots, slot: int) -> None:
        give(self, slot)
        self.leaves.append(slot)

    found = verdict(lambda patch: patch.setattr(Slots, "release", twice))
    assert "leaves but is empty" in found


def test_an_engine_without_retraction_is_noticed() -> None:
    found = verdict(
        lambda patch: patch.setattr(Scheduler, "_make_way", lambda self, starved, builder: None)
    )
    assert "no progress" in found


def test_a_state_restored_from_the_wrong_prefix_is_noticed() -> None:
    restore = StateCheckpoints._restore

    def wrong(self: StateCheckpoints, node, group, live, row, step):
        copy = restore(self, node, group, live, row, step)
        parent = node.parent
        if parent is not None and parent.pages and parent.pages[group]:
            return msgspec.structs.replace(copy, src=device_page(parent.pages[group][0]))
        return copy

    found = verdict(lambda patch: patch.setattr(StateCheckpoints, "_restore", wrong))
    assert "state" in found and "foreign" in found


def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    """A request believes one token more of a block to be its own."""
    shared = partial.shared_tokens

    def wrong(one: bytes, other: bytes) -> int:
        return min(shared(one, other) + 1, len(other) // TOKEN_BYTES)

    patch.setattr(partial, "shared_tokens", wrong)


def unlocked_sources(patch: pytest.MonkeyPatch) -> None:
    """What is copied may be evicted, and written by others, before the copy."""
    begin = PartialBlocks.begin

    def wrong(self: PartialBlocks, lease, row: int):
        part = lease.partial
        copies = begin(self, lease, row)
        if part is not None:
            self._unlock_node(part.node)
        return copies

    def end(self: PartialBlocks, ids) -> None:
        for copy_id in ids:
            if self._open.pop(copy_id, None) is not None:
                del self._epochs.open_copies[copy_id]

    patch.setattr(PartialBlocks, "begin", wrong)
    patch.setattr(PartialBlocks, "end", end)
    patch.setattr(EpochTracker, "now", lambda self: NEVER_USED)


PARTS = {"one token too many": one_token_too_many, "unlocked sources": unlocked_sources}


def test_a_part_of_one_token_too_many_is_noticed() -> None:
    assert "foreign" in verdict(one_token_too_many)


def test_a_part_whose_pages_are_given_out_before_they_are_copied_is_noticed() -> None:
    assert "rewritten while in use" in verdict(unlocked_sources)


def test_parts_of_another_tenant_are_noticed() -> None:
    find = PartialBlocks.find

    def anybodys(self: PartialBlocks, namespace: bytes, path, tokens, limit: int):
        for top in self._cached.tree._root.children:
            part = None if path else find(self, top, path, tokens, limit)
            if part is not None:
                return part
        return find(self, namespace, path, tokens, limit)

    assert "foreign" in verdict(lambda patch: patch.setattr(PartialBlocks, "find", anybodys))


def test_tails_of_more_than_was_written_are_noticed() -> None:
    keep = PartialBlocks.keep

    def longer(self: PartialBlocks, lease, tokens, written: int) -> None:
        keep(self, lease, tokens, min(written + 1, len(tokens) // TOKEN_BYTES))

    assert verdict(lambda patch: patch.setattr(PartialBlocks, "keep", longer))


def test_tokens_kept_of_a_row_that_was_recomputed_are_noticed() -> None:
    found = verdict(lambda patch: patch.setattr(RequestTable, "void", lambda self, request: None))
    assert found


def test_orders_that_are_lost_are_noticed() -> None:
    receive = EngineCore.receive

    def lose(self: EngineCore, message, now: float) -> None:
        if not isinstance(message, RunControlOps):
            receive(self, message, now)

    assert "no progress" in verdict(lambda patch: patch.setattr(EngineCore, "receive", lose))


def test_orders_that_come_before_the_steps_in_flight_have_ended_are_noticed() -> None:
    found = verdict(lambda patch: patch.setattr(EpochTracker, "is_clear", True))
    assert "has orders while" in found


def test_steps_that_are_launched_before_the_orders_have_ended_are_noticed() -> None:
    may_launch = EngineCore._may_launch

    def hasty(self: EngineCore) -> bool:
        return may_launch(self) or (self._running_ops is not None and not self._queued_ops)

    found = verdict(lambda patch: patch.setattr(EngineCore, "_may_launch", hasty))
    assert "is launched before the orders of" in found


def test_orders_that_are_answered_before_they_are_carried_out_are_noticed() -> None:
    builder = EngineCore._control_op_plan

    def answer_at_once(self: EngineCore, step: int):
        made = builder(self, step)
        result = StepResult(step=step, replies=[ControlOpReply(True)])
        self._end_control_ops(self._running_ops, result)
        return made

    found = verdict(lambda patch: patch.setattr(EngineCore, "_control_op_plan", answer_at_once))
    assert "is launched before the orders of" in found or "the replies say" in found


def test_pages_of_other_weights_that_stay_shared_are_noticed() -> None:
    found = verdict(lambda patch: patch.setattr(core, "weights_id", lambda version: b""))
    assert "foreign" in found


def test_pages_that_are_used_after_their_memory_was_released_are_noticed() -> None:
    found = verdict(
        lambda patch: patch.setattr(
            EngineCore,
            "_control_op_plan",
            without_release(EngineCore._control_op_plan),
        )
    )
    assert "never written" in found


def without_release(draft):
    """Orders are planned as they are, and nobody gives pages back for them."""

    def plan(self: EngineCore, step: int):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RequestTable, "retract_all", lambda request_table: None)
            patch.setattr(Scheduler, "flush", lambda scheduler: True)
            return draft(self, step)

    return plan


def test_steps_without_the_memory_that_they_need_are_noticed() -> None:
    is_done = EngineCore._apply

    def forget(self: EngineCore, *message: object) -> None:
        is_done(self, *message)
        self.released = []

    found = verdict(lambda patch: patch.setattr(EngineCore, "_apply", forget))
    assert "has rows while there is no" in found
