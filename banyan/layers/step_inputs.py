"""What a forward pass is given: the tensors of one step, and the attention that is bound to it.

Layers see this and nothing of requests, slots or plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from banyan.ops.api import Ops
from banyan.ops.state_api import StateRows
from banyan.parallel.groups import Group


@dataclass(frozen=True)
class AttentionSpec:
    """Facts of one attention layer that a backend needs.

    Attributes:
        layer: number of the layer within the model; the page store keeps K and V per layer.
        heads, kv_heads, head_dim: sizes on this rank.
        scale: factor on q·k before the softmax.
        window: tokens each position sees, itself included; 0 = all.
        soft_cap: logits become cap·tanh(logits/cap); 0 = off.
        unit: what numbers in pages of floats of 8 bits are multiples of.
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    unit: float = 1.0


@dataclass(frozen=True)
class LatentSpec:
    """Facts of one latent attention layer that a backend needs.

    Attributes:
        layer: number of the layer within the model.
        scale: factor on q·k before the softmax.
        top: positions that the indexer chooses, 0 = it has none.
    """

    layer: int
    scale: float
    top: int = 0


@dataclass(frozen=True)
class Indexed:
    """What the indexer of sparse attention makes of a step's tokens.

    Attributes:
        q, q_turned: [tokens, index heads, part of a head], that rotates not and that does.
        weights: [tokens, index heads].
        key, key_turned: [tokens, part of a head], one head for all.
    """

    q: Tensor
    q_turned: Tensor
    weights: Tensor
    key: Tensor
    key_turned: Tensor


class StepAttention(Protocol):
    """Attention bound to one step: its page tables, lengths and the page store."""

    def __call__(
        self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Write k, v into the pages of this step's positions, then attend over each row's context.

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], rotated already;
        sinks: [heads] fp32, logits that count in the softmax and have no value.
        returns: [tokens, heads, head_dim], same dtype as q.
        """
        ...

    def latent(
        self,
        spec: LatentSpec,
        q: Tensor,
        q_turned: Tensor,
        kept: tuple[Tensor, Tensor] | None,
        indexed: Indexed | None = None,
    ) -> Tensor:
        """Write what is `kept`, latent and key, into the pages of this step's positions, then
        attend over each row's context: `ops.api.Ops.latent_attention`.

        q: [tokens, heads, rank]; q_turned: [tokens, heads, rope_dim]; kept: [tokens, rank] and
        [tokens, rope_dim], rotated already like q_turned; None = they lie in the pages.
        returns: [tokens, heads, rank], same dtype as q.
        """
        ...

    def latent_pages(self, layer: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Where latents and keys of a layer lie, and the place of each token there, for whoever
        writes them before `latent`: `ops.prologue_api.LatentPrologue`."""
        ...


class StepStates(Protocol):
    """The states of one step's rows in the page store."""

    def __call__(self, layer: int) -> tuple[Mapping[str, Tensor], StateRows]:
        """What a layer keeps, by the names that it has declared, and where in it the rows are."""
        ...


@dataclass(frozen=True)
class Embedded:
    """Tokens of a step that are given as embeddings.

    Attributes:
        where: [n] int64, indices along the step's tokens.
        rows: [n, hidden] fp32, as rows of the checkpoint's embedding table.
    """

    where: Tensor
    rows: Tensor


class Taps:
    """Takes the residual stream of a step in front of some layers.

    Args:
        layers: their numbers.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._streams: list[Tensor] = []

    def take(
        self, layer: int, x: Tensor, residual: Tensor | None, ops: Ops, context: Group
    ) -> None:
        """x, residual: [tokens, hidden_size], what the block before adds to the stream, and that;
        once for each layer, from the first on. context: ranks that share the step's tokens."""
        count = self._layers.count(layer)
        if count:
            stream = x if residual is None else ops.add(x, residual)
            self._streams += [context.gather_rows(stream)] * count

    def of(self, tokens: Tensor) -> Tensor:
        """Of some tokens, [n] int64 along the step's: all streams side by side."""
        assert len(self._streams) == len(self._layers), "the model has no such layers"
        return torch.cat([stream[tokens] for stream in self._streams], dim=-1)


class Chosen:
    """Takes, behind the last attention, what goes on of a step: the tokens whose hidden states
    anybody reads. What it takes them from stays, so that a program takes others from it later.

    Args:
        tokens: [n] int64, indices along the step's.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self._whole: list[Tensor] = []

    def of(self, x: Tensor, ops: Ops) -> Tensor:
        """x: [tokens, width]; returns [n, width]."""
        self._whole.append(x)
        return ops.select_rows(x, self.tokens)


@dataclass(frozen=True)
class StepInputs:
    """Tensors of one step, on the device. Rows lie one after another along `tokens`.

    Attributes:
        tokens: [tokens] int64 ids.
        positions: [tokens] int64, absolute position of each token in its request.
        attention: attention bound to this step.
        states: those of layers that keep one.
        embedded: tokens whose ids are placeholders.
        carried: [tokens, width], what the model that is drafted for made of the token before each;
            None but in steps of a layer that reads it.
        taps: what is wanted of the layers' inputs beside the hidden states.
        chosen: the tokens whose hidden states are wanted; None = all. Only of a model that
            `narrows`.
    """

    tokens: Tensor
    positions: Tensor
    attention: StepAttention
    states: StepStates
    embedded: Embedded | None = None
    carried: Tensor | None = None
    taps: Taps | None = None
    chosen: Chosen | None = None
