"""The operations of blocks of experts, a part of `ops/api.py`: signatures, shapes and dtypes."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from banyan.ops.lora import AdapterTable, AdapterTokens, ExpertSides
from banyan.ops.stored import StoredWeight


class PackedExperts(Protocol):
    """The feed-forward blocks of this rank's experts, in the form of their kernel."""

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, sides: ExpertSides | None = None
    ) -> Tensor:
        """The sum over a token's experts of weight · down(act(gate(x)) · up(x)), or without gates
        of weight · down(act(up(x))).

        Experts add up in the order of their numbers; experts of other ranks add nothing.

        x: [tokens, dim] T; ids: [tokens, per_token] int64, different ones for a token;
        weights: [tokens, per_token] fp32; sides: LoRA adapters; they add to the outputs of each
        projection, before the activation and before the weights.
        returns: [tokens, dim] T.
        """
        ...

    def apart(self, x: Tensor, ids: Tensor) -> Tensor:
        """down(act(gate(x)) · up(x)) of each pair of a token and an expert; zeros for experts of
        other ranks.

        x, ids: as above, but a token may have the same number twice.
        returns: [tokens, per_token · dim] T.
        """
        ...

    def parts(self, at: int) -> list[Tensor]:
        """The contiguous tensors of the expert at a place, counted from the first one here. All
        experts have the same number of tensors, types and shapes."""
        ...

    def put(self, at: int, parts: list[Tensor]) -> None:
        """Replace the expert at a place by one of such parts; later steps run it."""
        ...


@dataclass(frozen=True)
class Ranks:
    """The ranks that exchange rows by an operator of their device.

    Attributes:
        name: the library's name of their group.
    """

    name: str
    rank: int
    size: int


class ExchangingExperts(PackedExperts, Protocol):
    """Experts of devices with exchanges of a fixed size (`platform.base.Dispatch`)."""

    def exchanged(
        self, x: Tensor, ids: Tensor, weights: Tensor, ranks: Ranks, tokens: int
    ) -> Tensor:
        """Like `__call__`, for this rank's rows and the experts of all ranks.

        All ranks pass the same `tokens`; x, ids, weights: as in `__call__`, up to `tokens` rows.
        returns: [tokens, dim] T; rows beyond the rows of x have no meaning.
        """
        ...


@dataclass(frozen=True)
class ExpertPlaces:
    """The places of a layer's experts, in memory of a fixed address. Places are numbered through
    all ranks.

    Attributes:
        slots: [experts, room] int32, the places of each, `copies` of them.
        copies: [experts] int32.
    """

    slots: Tensor
    copies: Tensor


@dataclass(frozen=True)
class Clamp:
    """A gated unit that is clamped (gpt-oss): gate · sigmoid(alpha · gate) · (up + 1), where the
    gate is at most the limit and the up at most the limit to either side. With an alpha of 0 it is
    silu(gate) that is at most the limit, and the up has no 1 (Step-3.5)."""

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
        total: experts of the layer, on all ranks; 0 = those that are here.
    """

    first: int
    gate: tuple[StoredWeight, ...]
    up: tuple[StoredWeight, ...]
    down: tuple[StoredWeight, ...]
    activation: str
    biases: tuple[Tensor, Tensor, Tensor] | None = None
    clamp: Clamp | None = None
    total: int = 0


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts; fields are named as in `model_config.ExpertFacts`."""

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
        adapters: tuple[AdapterTable, AdapterTokens] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The experts of each token, and their weights.

        Scores are softmax or sigmoid of x · weightᵀ + bias in fp32. The choice is by score +
        correction, among the best groups; the lower id wins a tie. The weights are the scores of
        the chosen, divided by their sum if `is_normalised`, times the scale. By "sparsemixer"
        (arXiv 2409.12136) the best logits are chosen, and the weight of each is its softmax among
        the logits not chosen before that lie within 2 · jitter of it, relative to the larger
        magnitude; then there are no groups, correction and scale.

        x: [tokens, dim] T; weight: [experts, dim] fp32; correction, bias: [experts] fp32 or None;
        adapters: LoRA adapters of the router; they add to x · weightᵀ, as `adapt` does.
        returns: ids [tokens, per_token] int64, best first; weights [tokens, per_token] fp32.
        """
        ...

    def pack_experts(self, experts: StoredExperts) -> PackedExperts:
        """Prepare the feed-forward blocks of a layer's experts.

        Called at load, once per layer. Quantised weights may keep their bits.
        """
        ...

    def place_experts(self, ids: Tensor, places: ExpertPlaces, dispatch: str) -> Tensor:
        """The place to which each pair of a token and an expert goes.

        By "static" token n goes to the n-th of an expert's places, by "dynamic" the n-th pair of
        the step that has this expert; both begin again after the last one. By "even" the result
        are experts instead: each as often as the others, whatever `ids` says.

        ids: [tokens, per_token] int64.
        returns: [tokens, per_token] int64.
        """
        ...

    def combine_experts(self, x: Tensor, ids: Tensor, weights: Tensor, home: int) -> Tensor:
        """The sum over a token's experts of weight · x, in the order of their numbers within each
        `home` of these, and then over those: as ranks add up that hold so many each.

        x: [tokens, per_token · dim] T; ids: [tokens, per_token] int64; weights: as ids, fp32.
        returns: [tokens, dim] T.
        """
        ...

    def sigmoid_scale(self, x: Tensor, gate: Tensor) -> Tensor:
        """x · sigmoid(gate), a gate for each of the equal pieces of a row.

        x: [tokens, dim] T; gate: [tokens, pieces] T.
        returns: [tokens, dim] T.
        """
        ...
