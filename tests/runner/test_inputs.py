"""The inputs of steps of a few rows, which are entered as plain numbers, beside those of arrays."""

from array import array
from random import Random

import pytest
import torch

from banyan.messages.plan import SAMPLE, SCORE, Join, PageGrant, Row
from banyan.messages.sampling_params import SamplingParams
from banyan.model_config.model_config import FULL, STATE, WINDOW
from banyan.platform.cpu import CpuPlatform
from banyan.runner import inputs
from banyan.runner.batch import Batch
from banyan.runner.inputs import StepSizes, StepTensors
from banyan.runner.kvstore import GroupLayout, KVStore
from banyan.runner.slots import SlotTable

CPU = torch.device("cpu")
SLOTS, LENGTH = 6, 40
GROUPS = (
    GroupLayout(FULL, 0, 4, 100),
    GroupLayout(WINDOW, 8, 8, 100),
    GroupLayout(STATE, 0, 16, 100),
)


def filled(table: SlotTable, batches: list[Batch]) -> list[list[torch.Tensor]]:
    """What each of the batches finds, one after another in the same memory."""
    step = StepTensors(table, KVStore(GROUPS, [], CPU), CpuPlatform(), CPU, StepSizes(8, 8, 8))
    found = []
    for batch in batches:
        step.fill(batch)
        rows, outputs = len(batch.rows), len(batch.last)
        width = [layout.columns(int(max(batch.ends))) for layout in GROUPS]
        found.append(
            [
                *(step.tokens[:rows], step.positions[:rows], step.context_lengths[:rows]),
                step.row_starts[: rows + 1],
                *(pages[:rows, :w] for pages, w in zip(step.page_tables, width, strict=True)),
                *(places[:rows] for places in step.locations),
                *(step.chosen[:outputs], step.to_slots[:outputs], step.to_positions[:outputs]),
            ]
        )
        found[-1] = [tensor.clone() for tensor in found[-1]]
    return found


def test_a_few_rows_are_entered_as_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(5)
    table = SlotTable(SLOTS, LENGTH, 1000, GROUPS, CPU)
    for slot in range(1, SLOTS + 1):
        ids = array("i", random.choices(range(1000), k=LENGTH))
        table.join([Join(slot, ids.tobytes(), LENGTH, SamplingParams(max_new_tokens=1))])
        for group, layout in enumerate(GROUPS):
            pages = random.choices(range(1, 100), k=layout.columns(LENGTH))
            table.grant([PageGrant(slot, group, 0, pages)])
    batches = []
    for _ in range(100):
        slots = random.sample(range(1, SLOTS + 1), random.randint(1, SLOTS))
        rows = [
            Row(slot, random.randrange(LENGTH), 1, want=random.choice([0, SAMPLE, SAMPLE | SCORE]))
            for slot in slots
        ]
        batches.append(Batch.of(list(enumerate(rows))))
    few = filled(table, batches)
    monkeypatch.setattr(inputs, "_FEW", 0)
    for mine, other in zip(few, filled(table, batches), strict=True):
        for one, another in zip(mine, other, strict=True):
            assert torch.equal(one, another)
