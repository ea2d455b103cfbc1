"""Identifiers as distinct types, so that one kind of number cannot take another's place."""

import os
from typing import NewType

RequestId = NewType("RequestId", str)
"""One generation, unique while it lives. Chosen by the front."""

SlotId = NewType("SlotId", int)
"""Row index that a running request holds on every rank. Slot 0 is padding, never given out."""

PageId = NewType("PageId", int)
"""Smallest unit of cache allocation of one group. Page 0 is padding and is never given out."""

StepId = NewType("StepId", int)
"""Number of a launched plan, counted from 1. 0 means "no step"."""

PADDING_SLOT = SlotId(0)
PADDING_PAGE = PageId(0)
NO_STEP = StepId(0)


def fresh_id() -> str:
    """128 random bits as hex: an id that no client can guess or choose."""
    return os.urandom(16).hex()
