"""Splits a step's tokens among context parallel ranks.

Rows are cut into pieces. A piece is a row like any other: of the same slot, with a context that
ends where the piece begins. Keys and values of all pieces are written to the pages before any is
read, so a token's result does not depend on the rank that computes it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch

from banyan.runner.batch import Batch, WholeStep

Pieces = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Arrays with one entry per piece: row, first token within the row, number of tokens, and the share
that computes it; in the order of the step's tokens."""


@dataclass(frozen=True)
class ContextParallelSplit:
    """
    Attributes:
        part: the batch that this rank computes; it has the outputs of the whole step.
        counts: tokens of each share.
        places: [tokens], index of each of the step's tokens when they are ordered share by share.
    """

    part: Batch
    counts: list[int]
    places: np.ndarray


def split_batch(batch: Batch, share: int, shares: int, split: str) -> ContextParallelSplit:
    """Split a step; `part` of the result is the share `share`."""
    row, first, count, owner = SPLITS[split](batch.counts, shares)
    order = np.argsort(owner, kind="stable")
    row, first, count, owner = row[order], first[order], count[order], owner[order]
    begins = np.concatenate(([0], np.cumsum(count)))
    shift = np.repeat(batch.offsets[row] + first - begins[:-1], count)
    tokens = np.arange(begins[-1]) + shift  # of the step, share by share
    places = np.empty(len(tokens), np.int64)
    places[tokens] = np.arange(len(tokens))
    slots = np.repeat(batch.slots, batch.counts)[tokens]
    mine = owner == share
    own = np.repeat(mine, count)
    starts, counts = (batch.starts[row] + first)[mine], count[mine]
    sizes = np.bincount(owner, count, shares).astype(np.int64).tolist()
    largest = (max(sizes), int(np.bincount(owner).max()))
    part = replace(
        batch,
        slots=batch.slots[row[mine]],
        starts=starts,
        counts=counts,
        ends=starts + counts,
        offsets=np.concatenate(([0], np.cumsum(counts))),
        last=places[batch.last],
        carried=None if batch.carried is None else batch.carried[torch.from_numpy(tokens[own])],
        whole_step=WholeStep(slots, batch.positions[tokens], *largest),
    )
    return ContextParallelSplit(part, sizes, places)


def share_capacity(tokens: int, rows: int, shares: int, split: str) -> tuple[int, int]:
    """Usual tokens and pieces of one share for a step of so many tokens and rows; rows that are cut
    unevenly may need more."""
    if split == INTERLEAVE:
        most = -(-tokens // shares)
        return most, most
    return -(-tokens // shares) + rows, 2 * rows


def zigzag(counts: np.ndarray, shares: int) -> Pieces:
    """Cut each row into 2 · shares equal pieces; share s gets the s-th piece from both ends, so all
    shares read equally many keys. The first share rotates from row to row."""
    cuts = np.delete(np.arange(2 * shares + 1), shares)  # the middle two belong to one share
    borders = counts[:, None] * cuts // (2 * shares)
    rows, pieces = len(counts), len(cuts) - 1
    owners = np.minimum(np.arange(pieces), np.arange(pieces)[::-1])
    owner = (owners + np.arange(rows)[:, None]) % shares
    row = np.repeat(np.arange(rows), pieces)
    sizes = np.diff(borders, axis=1).ravel()
    there = sizes > 0
    return row[there], borders[:, :-1].ravel()[there], sizes[there], owner.ravel()[there]


def interleave(counts: np.ndarray, shares: int) -> Pieces:
    """Token i of the step belongs to share i mod shares."""
    tokens = int(counts.sum())
    row = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    index = np.arange(tokens)
    return row, index - begins[row], np.ones(tokens, np.int64), index % shares


ZIGZAG, INTERLEAVE = "zigzag", "interleave"
SPLITS: MappingProxyType[str, Callable[[np.ndarray, int], Pieces]] = MappingProxyType(
    {ZIGZAG: zigzag, INTERLEAVE: interleave}
)
