"""The border kit notices broken runners: each case spoils one place of the real one."""

import logging
from collections.abc import Callable
from dataclasses import replace
from random import Random

import msgspec
import numpy as np
import pytest

from banyan.base.errors import RequestError
from banyan.messages.control_ops import ControlOpReply, StopProfile
from banyan.runner import attention as reference
from banyan.runner import runner
from banyan.runner.batch import Batch
from banyan.runner.control_ops import ControlOpExecutor
from banyan.runner.kvstore import GroupLayout, KVStore
from banyan.runner.logprobs import StepScores
from banyan.runner.recorded_forward import RecordedForward
from banyan.runner.runner import ModelRunner
from banyan.runner.sampler import Sampler
from banyan.runner.slots import SlotTable
from banyan.runner.speculative import drafting
from banyan.runner.speculative.drafting import Drafting
from banyan.runner.step_outputs import Pooler
from tests.border.driver import play, random_actions
from tests.border.real_kit import REAL
from tests.border.test_kit import PARTS

pytestmark = pytest.mark.usefixtures("one_thread")
WORLDS = range(1, 61)

Patch = pytest.MonkeyPatch
Defect = Callable[[Patch], None]


def _wrap(owner: object, name: str, spoil: Callable[..., object]) -> Defect:
    """`spoil` is called in place of owner.name, with the original before the other arguments."""
    original = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *a, **k: spoil(original, *a, **k))


def _changed(owner: object, name: str, change: Callable[..., tuple]) -> Defect:
    """owner.name is called with what `change` makes of its arguments."""
    return _wrap(owner, name, lambda original, *a: original(*change(*a)))


def _grants(change: Callable[[list], list]) -> Defect:
    return _changed(SlotTable, "grant", lambda self, grants: (self, change(grants)))


def _copies(change: Callable[[str], str]) -> Defect:
    return _changed(KVStore, "copy", lambda self, copies, when: (self, copies, change(when)))


def _seen(window: int) -> Defect:
    """A window layer sees `window` positions more."""
    bound = reference.PagedStep

    def change(self, spec, *more):
        wrong = max(1, spec.window + window) if spec.window else 0
        return self, replace(spec, window=wrong), *more

    return _changed(bound, "__call__", change)


def _copies_no_keys(original, self, copies, when):
    kept = [(pages["k"], pages["k"].clone()) for pages in self._tensors.values() if "k" in pages]
    original(self, copies, when)
    for keys, before in kept:
        keys.copy_(before)


def _keeps_pages(original, self, leaves):
    granted = [list(counts) for counts in self._granted]
    tables = [table.clone() for table in self.pages]
    original(self, leaves)
    for mine, counts, pages, table in zip(self._granted, granted, self.pages, tables, strict=True):
        mine[:] = counts
        pages.copy_(table)


def _keeps_parameters(original, self, join):
    """The second request of a slot is sampled as the first was."""
    before = self.params[join.slot].copy()
    original(self, join)
    if before["temperature"]:
        self.params[join.slot] = before


def _forgets_its_token(original, self, *more):
    before = self._table.tokens.clone()
    sampled = original(self, *more)
    self._table.tokens.copy_(before)
    return sampled


def _keeps_failed_tokens(original, begun, *more):
    result = original(begun, *more)
    tokens = [
        bytes(4) if f.row == i else t for f in result.failed for i, t in enumerate(result.tokens)
    ]
    return msgspec.structs.replace(result, tokens=tokens[: len(begun.plan.rows)] or result.tokens)


def _forgets_failures(original, *parts):
    result = original(*parts)
    tokens = [tokens or bytes(4) for tokens in result.tokens]
    return msgspec.structs.replace(result, tokens=tokens, failed=[])


def _masks_of_others(self, count, masks):
    return self, count, {(i + 1) % count: mask for i, mask in masks.items()}


def _starts_at_zero(original, rows, *more):
    batch = original(rows, *more)
    return replace(batch, starts=np.zeros_like(batch.starts))


def _hides_nothing(original, forward, batch):
    rows = [msgspec.structs.replace(row, hidden_from=0) for row in batch.rows]
    return original(forward, replace(batch, rows=rows))


def _forgets_penalties(original, self, join):
    original(self, join)
    self.params[join.slot]["penalised"] = False


def _joins_first_only(original, self, joins):
    """A refused request makes those that join after it in the same step stay out."""
    for at, join in enumerate(joins):
        original(self, joins[at : at + 1])
        if join.slot in self._refused:
            return


def _is_read_late(original, self, plan, mask_of):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedForward, "results_are_final", True)
        return original(self, plan, mask_of)


def _shifted(original, self, *a, **k):
    """Each score stands where the next one belongs."""
    found = original(self, *a, **k)
    return [
        msgspec.structs.replace(score, logprobs=score.logprobs[4:] + score.logprobs[:4])
        for score in found
    ]


def _skips_orders(original, self, order):
    """It gets ready, and leaves it at that."""
    prepare = self._preparers[type(order)]
    try:
        prepare(order)
    except RequestError as error:
        return ControlOpReply(False, str(error))
    return ControlOpReply(True, "done")


def _obeys_twice(original, self, order):
    original(self, order)
    return original(self, order)


def _obeys_unready(original, self, order):
    """An obstacle is reported, and it is done all the same."""
    reply = original(self, order)
    if not reply.ok:
        self._preparers[StopProfile].__self__._obey(order)
    return reply


def _one_later(original, self, *a, **k):
    return [
        msgspec.structs.replace(score, first=score.first + 1) for score in original(self, *a, **k)
    ]


def _grows_by_all(original, self, batch, sampled):
    """The slot counts its rejected drafts too."""
    verified = original(self, batch, sampled)
    for index, count in verified.cut.items():
        at = batch.indices.tolist().index(index)
        self._table.known[batch.rows[at].slot] += count
    return verified


def _with_first_mask(original, self, logits, slots, positions, masks, *more):
    """The masks of drafts are those of the token before them."""
    first = {
        i: masks.get(i - 1, mask) if slots[i - 1] == slots[i] else mask for i, mask in masks.items()
    }
    return original(self, logits, slots, positions, first, *more)


def _reported_shorter(original, self, batch, verified, num_rows):
    """The engine hears of one draft less than the next row verifies."""
    original(self, batch, verified, num_rows)
    verified.drafts = [drafts[:-4] for drafts in verified.drafts]


def _scores_all(original, self, values, without, cut):
    return original(self, values, without, {})


DEFECTS: dict[str, Defect] = {
    "parts of units have one token too many": PARTS["one token too many"],
    "parts are copied from pages that are rewritten first": PARTS["unlocked sources"],
    "every draft stands": _wrap(
        drafting, "accepted_places", lambda original, drafts, *a: list(range(len(drafts) + 1))
    ),
    "one draft too many stands": _wrap(
        drafting,
        "accepted_places",
        lambda original, drafts, *a: list(range(min(len(drafts), len(original(drafts, *a))) + 1)),
    ),
    "the model's own token after the drafts is lost": _wrap(
        drafting, "accepted_places", lambda original, *a: original(*a)[:-1] or [0]
    ),
    "rejected drafts count": _wrap(Drafting, "verify", _grows_by_all),
    "drafts have the masks of the token before": _wrap(Sampler, "sample", _with_first_mask),
    "the engine gets other drafts": _wrap(Drafting, "draft", _reported_shorter),
    "rows of drafts start where the plan says": _wrap(
        SlotTable, "_exact", lambda original, self, row: row
    ),
    "scores of rejected drafts are reported": _wrap(StepScores, "rows", _scores_all),
    "a page table is off by one": _grants(
        lambda grants: [msgspec.structs.replace(g, first=g.first + 1) for g in grants]
    ),
    "page numbers are off by one": _grants(
        lambda grants: [
            msgspec.structs.replace(g, pages=[max(0, p - 1) for p in g.pages]) for g in grants
        ]
    ),
    "a grant is dropped": _grants(lambda grants: grants[:-1]),
    "the pages of a grant are swapped": _grants(
        lambda grants: [msgspec.structs.replace(g, pages=g.pages[::-1]) for g in grants]
    ),
    "a slot keeps its pages when its request leaves": _wrap(SlotTable, "leave", _keeps_pages),
    "nobody leaves": _changed(SlotTable, "leave", lambda self, leaves: (self, [])),
    "copies after the rows come before them": _copies(lambda when: "before"),
    "copies before the rows come after them": _copies(lambda when: "after"),
    "copies leave the keys out": _wrap(KVStore, "copy", _copies_no_keys),
    "a window is one too short": _seen(-1),
    "a window is one too long": _seen(1),
    "all layers use the tables of the first group": _wrap(
        KVStore, "group_of", lambda original, self, layer: 0
    ),
    "K and V lie one place further in a page": _changed(
        GroupLayout, "locate", lambda self, pages, positions: (self, pages, positions + 1)
    ),
    "the last token of a join stays stale": _changed(
        SlotTable, "_write", lambda self, slot, first, tokens: (self, slot, first, tokens[:-1])
    ),
    "the start of a row is ignored": _wrap(Batch, "of", _starts_at_zero),
    "a sampled token is lost to the next step": _wrap(Sampler, "sample", _forgets_its_token),
    "a late result is read from memory in use": _wrap(ModelRunner, "_execute", _is_read_late),
    "a request is sampled with another's parameters": _wrap(SlotTable, "_take", _keeps_parameters),
    "masks bind the next row": _changed(Sampler, "_masks", _masks_of_others),
    "masks bind nobody": _changed(Sampler, "_masks", lambda self, count, masks: (self, count, {})),
    "scores are those of the next position": _wrap(StepScores, "rows", _shifted),
    "scores begin one position late": _wrap(StepScores, "rows", _one_later),
    "a failed row keeps a token": _wrap(runner, "build_result", _keeps_failed_tokens),
    "a failed row is not reported": _wrap(runner, "build_result", _forgets_failures),
    "given tokens are not taken": _changed(
        SlotTable,
        "prepare",
        lambda self, row, samples: (self, msgspec.structs.replace(row, given=b""), samples),
    ),
    "the copies of a failed step are reported as done": _wrap(
        runner, "LaunchedStep", lambda original, *a, is_broken=False: original(*a)
    ),
    "hidden states are those of the whole row": _wrap(runner, "read_hidden_states", _hides_nothing),
    "penalties are forgotten": _wrap(SlotTable, "_take", _forgets_penalties),
    "biases and bans are forgotten": _changed(
        Sampler, "_addends", lambda self, slots, positions: (self, slots[:0], positions[:0])
    ),
    "a refused request keeps out those that join with it": _wrap(
        SlotTable, "join", _joins_first_only
    ),
    "orders are not carried out": _wrap(ControlOpExecutor, "_execute", _skips_orders),
    "orders are carried out twice": _wrap(ControlOpExecutor, "_execute", _obeys_twice),
    "an order that failed is carried out": _wrap(ControlOpExecutor, "_execute", _obeys_unready),
    "released pages come back as they were": lambda patch: patch.setattr(
        KVStore, "release", lambda self: None
    ),
    "a vector is that of the first token": lambda patch: patch.setattr(
        Pooler, "_pool", lambda self, forward, batch, rows: forward.hidden(batch.offsets[rows])
    ),
}


SELDOM_SEEN = (
    "a refused request keeps out those that join with it",
    "a vector is that of the first token",
    "drafts have the masks of the token before",
)
"""Few worlds show them, so it takes long until one does."""


@pytest.mark.parametrize(
    "defect",
    [
        pytest.param(each, marks=pytest.mark.full) if each in SELDOM_SEEN else each
        for each in DEFECTS
    ],
)
def test_a_broken_runner_is_noticed(defect: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        DEFECTS[defect](patch)
        found = verdict()
        assert found, f"{len(WORLDS)} worlds went well although {defect}"


def verdict() -> str:
    """What the kit says; "" when it sees nothing."""
    for seed in WORLDS:
        try:
            play(seed, random_actions(Random(seed), 250), kit=REAL)
        except Exception as error:
            return f"world {seed}: {type(error).__name__}: {error}"
    return ""
