"""Ops on logits; part of `ops.api.Ops`. Letters and rules as there."""

from typing import Protocol

from torch import Tensor


class LogitOps(Protocol):
    """What may be done to logits before a token is drawn."""

    def scale_logits(self, logits: Tensor, scale: float, soft_cap: float) -> Tensor:
        """logits · scale, then cap·tanh(logits/cap) unless the cap is 0, in fp32.

        logits: [n, ids] T.
        returns: [n, ids] fp32.
        """
        ...

    def spread_columns(self, x: Tensor, columns: Tensor, width: int) -> Tensor:
        """Logits of some ids among those of all, where the others can never be drawn.

        x: [n, ids] fp32; columns: [ids] int64, where each goes, below `width`.
        returns: [n, width] fp32, −∞ elsewhere.
        """
        ...
