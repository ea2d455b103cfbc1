"""Contents for the model of `page_numbers.py`: each feature row is a code, as a thermometer, in
place of the code that a token has in the first layer. What the tower has not finished is poison."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from banyan.messages.plan import NewContent, StepPlan
from banyan.messages.spans import ContentKind, Span
from tests.border.fake_features import CONTENTS, content_of
from tests.border.laws import require
from tests.border.page_numbers import BASE, UNITS, WIDTH, thermometer

PLACEHOLDER = 0
"""Token of a slot at the places of spans."""
_NUMBERS = {content_of(number).digest: number for number in range(CONTENTS)}


def codes_of(digest: bytes) -> np.ndarray:
    """[rows, WIDTH]"""
    number = _NUMBERS[digest]
    random = np.random.default_rng(1000 + number)
    return random.integers(0, BASE, (content_of(number).rows, WIDTH))


def codes_at(spans: Sequence[Span]) -> Mapping[int, np.ndarray]:
    """The code of each place of a prompt that is given by content."""
    return {
        span.first + at: codes_of(span.digest)[span.offset + at]
        for span in spans
        for at in range(span.count)
    }


def filled(plan: StepPlan) -> StepPlan:
    """The plan with the data of its contents."""

    def data_of(content: NewContent) -> bytes:
        codes = codes_of(content.digest)
        if content.kind == ContentKind.PATCHES:
            return codes.astype(np.uint8).tobytes()
        return np.stack([thermometer(code) for code in codes]).tobytes()

    contents = [msgspec.structs.replace(each, data=data_of(each)) for each in plan.contents]
    return msgspec.structs.replace(plan, contents=contents)


@dataclass
class PageTowerState:
    codes: Tensor
    done: int = 0


class PageTower:
    """A `models.towers.vision.Tower`: a content that has not passed all blocks is poison."""

    width = UNITS

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    def begin(self, content: Tensor, grid: tuple[int, int, int]) -> PageTowerState:
        require(tuple(content.shape) == (math.prod(grid), WIDTH), f"{content.shape} of {grid}")
        return PageTowerState(content)

    def run(self, state: PageTowerState, first_block: int, blocks: int) -> None:
        require(first_block == state.done, f"block {first_block} after {state.done} blocks")
        state.done += blocks

    def end(self, state: PageTowerState) -> Tensor:
        rows = np.stack([thermometer(code) for code in state.codes.numpy().astype(np.int64)])
        found = torch.from_numpy(rows)
        return found if state.done == self.blocks else torch.full_like(found, torch.nan)

    def cost(self, grid: tuple[int, int, int]) -> int:
        return math.prod(grid)
