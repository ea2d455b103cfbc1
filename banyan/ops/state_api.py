"""The operations of layers that keep a running state, a part of `ops/api.py`: signatures, shapes
and dtypes.

A row at position 0 begins with a state of zeros, whatever its page holds; any other row goes on
from its page. Tokens are taken in one after another, so that a token's value does not depend on
where its prompt was cut.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class StateRows:
    """Where the rows of a step keep their states.

    Attributes:
        pages: [rows] int32, page of each row's state; entries may lie apart.
        row_starts: [rows + 1] int32; row r owns tokens row_starts[r] … row_starts[r + 1] − 1.
        context_lengths: [rows] int32, positions before this step's tokens.
        rollback_checkpoints: [rows, 2] int32: a first page and a number of pages. The state after
            each of that many tokens of a row, except the last, is also stored to these pages, one
            after another, because draft tokens may be rejected. None = there are no drafts.
    """

    pages: Tensor
    row_starts: Tensor
    context_lengths: Tensor
    rollback_checkpoints: Tensor | None = None


class StateOps(Protocol):
    """See `ops.api.Ops`."""

    def apply_gate(self, x: Tensor, gate: Tensor, curve: str) -> Tensor:
        """x · curve(gate), number by number.

        x, gate: [tokens, dim] T, tokens may lie apart; curve: "" (the gate itself) | "silu" |
        "sigmoid" | "relu" (of x itself: the square of what is above zero).
        returns: [tokens, dim] T.
        """
        ...

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        has_silu: bool,
        last_inputs: Tensor,
        rows: StateRows,
    ) -> Tensor:
        """Each channel's causal convolution along its row: token t of a row gets the sum of
        weight[i] · x[t − conv_kernel + 1 + i], the bias, and silu of that if `has_silu`.

        x: [tokens, channels] T, tokens may lie apart; weight: [conv_kernel, channels] fp32;
        bias: [channels] fp32 or None; last_inputs: [num_pages, conv_kernel − 1, channels] fp32, the
        inputs before the row of each state; changes in place.
        returns: [tokens, channels] T, sums in fp32, the oldest input first.
        """
        ...

    def decay_gates(
        self, x: Tensor, bias: Tensor, rate: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor]:
        """How far a state moves on with each token, and what is left of it then:
        step = softplus(x + bias), at least `low` and at most `high`, and exp(−rate · step).

        x: [tokens, n] T, tokens may lie apart; bias, rate: [n] fp32.
        returns: step, kept [tokens, n] fp32.
        """
        ...

    def scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kept: Tensor,
        strength: Tensor,
        skip: Tensor | None,
        has_delta: bool,
        states: Tensor,
        rows: StateRows,
    ) -> Tensor:
        """Linear attention with a state S [key_dim, value_dim] per head that forgets: of each token

            S ← kept · S;   S ← S + k ⊗ u;   out = q · S + skip · v

        where u = strength · v, or with `has_delta` u = sigmoid(strength) · (v − k · S) (gated delta
        rule, arXiv 2412.06464; without, the state space dual of arXiv 2405.21060).

        q, k: [tokens, key_heads, key_dim] T; v: [tokens, heads, value_dim] T, head h uses key head
        h // (heads/key_heads); tokens may lie apart;
        kept: [tokens, heads] fp32, or one for each key dimension, [tokens, heads, key_dim] (arXiv
        2510.26692); strength: [tokens, heads] fp32; skip: [heads] fp32 or None;
        states: [num_pages, heads, key_dim, value_dim] fp32, or bf16, to which a state is then
        rounded after each step; changes in place.
        returns: [tokens, heads, value_dim] T, sums in fp32.
        """
        ...

    def selective_scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Tensor,
        rate: Tensor,
        skip: Tensor,
        states: Tensor,
        rows: StateRows,
    ) -> Tensor:
        """A state S [key_dim, channels] whose numbers decay at their own rates (Mamba,
        arXiv 2312.00752). Per token:

            S ← exp(−rate · step) · S + k ⊗ (step · v);   out = q · S + skip · v

        q, k: [tokens, key_dim] T; v: [tokens, channels] T; step: [tokens, channels] fp32; tokens
        may lie apart; rate: [key_dim, channels] fp32; skip: [channels] fp32;
        states: [num_pages, key_dim, channels] fp32 or bf16, as above; changes in place.
        returns: [tokens, channels] T, sums in fp32.
        """
        ...
