"""The operations of blocks of experts, a part of `ops/api.py`: signatures, shapes and dtypes."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from banyan.ops.stored import StoredWeight


class PackedExperts(Protocol):
    """The feed-forward blocks of this rank's experts, in the form of the kernel that runs them."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The sum over a token's experts of weight · down(act(gate(x)) · up(x)), or without gates
        of weight · down(act(up(x))).

        Experts add up in the order of their numbers; those that are elsewhere add nothing.

        x: [tokens, dim] T; ids: [tokens, per_token] int64, different ones for a token;
        weights: [tokens, per_token] fp32.
        returns: [tokens, dim] T.
        """
        ...


@dataclass(frozen=True)
class Clamp:
    """A gated unit that is clamped (gpt-oss): gate · sigmoid(alpha · gate) · (up + 1), where the
    gate is at most the limit and the up at most the limit to either side."""

    limit: float
    alpha: float


@dataclass(frozen=True)
class StoredExperts:
    """The weights of some experts of a layer, each a triple of matrices.

    Attributes:
        first: number of the first one; the others follow it.
        gate, up: [inner, dim] each; no gates where the activation is "relu2", the square of what
            is above zero.
        down: [dim, inner] each.
        activation: Hugging Face name of the gate's function, as for `layers/mlp.py`.
        biases: of gate, up [experts, inner] and down [experts, dim], fp32.
        clamp: takes the place of the activation.
    """

    first: int
    gate: tuple[StoredWeight, ...]
    up: tuple[StoredWeight, ...]
    down: tuple[StoredWeight, ...]
    activation: str
    biases: tuple[Tensor, Tensor, Tensor] | None = None
    clamp: Clamp | None = None


@dataclass(frozen=True)
class Routing:
    """How tokens choose among experts; the words are those of `config.card.ExpertFacts`."""

    per_token: int
    scoring: str = "softmax"
    is_normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    jitter: float = 0.0


class ExpertOps(Protocol):
    """See `ops.api.Ops`."""

    def route(
        self,
        x: Tensor,
        weight: Tensor,
        correction: Tensor | None,
        rule: Routing,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Which experts each token goes through, and with what weight.

        Scores are softmax or sigmoid of x · weightᵀ + bias in fp32. The choice is by score +
        correction, among the best groups; the lower id wins a tie. The weights are the scores of
        the chosen, divided by their sum if `is_normalised`, times the scale. By "sparsemixer"
        (arXiv 2409.12136) the best logits are chosen, and the weight of each is its softmax among
        the logits not chosen before that lie within 2 · jitter of it, relative to the larger
        magnitude; then there are no groups, correction and scale.

        x: [tokens, dim] T; weight: [experts, dim] fp32; correction, bias: [experts] fp32 or None.
        returns: ids [tokens, per_token] int64, best first; weights [tokens, per_token] fp32.
        """
        ...

    def pack_experts(self, experts: StoredExperts) -> PackedExperts:
        """Make the feed-forward blocks of a layer's experts ready to run.

        Called at load, once per layer. Quantised weights may keep their bits.
        """
        ...

    def sigmoid_scale(self, x: Tensor, gate: Tensor) -> Tensor:
        """x · sigmoid(gate), a gate for each row.

        x: [tokens, dim] T; gate: [tokens, 1] T.
        returns: [tokens, dim] T.
        """
        ...
