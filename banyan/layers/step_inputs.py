"""StepInputs: the tensors of one forward pass and the attention that is bound to the step."""

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
    """Properties of one attention layer that a backend needs.

    Attributes:
        layer: number of the layer in the model; the page store keeps K and V per layer.
        heads, kv_heads, head_dim: sizes on this rank.
        scale: factor on q·k before the softmax.
        window: tokens each position sees, itself included; 0 = all.
        soft_cap: logits become cap·tanh(logits/cap); 0 = off.
        unit: scale of 8-bit float values in pages.
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
    """Properties of one latent attention layer that a backend needs.

    Attributes:
        layer: number of the layer in the model.
        scale: factor on q·k before the softmax.
        top: positions that the indexer chooses, 0 = no indexer.
    """

    layer: int
    scale: float
    top: int = 0


@dataclass(frozen=True)
class IndexerOutput:
    """Output of the sparse attention indexer for a step's tokens.

    Attributes:
        q, q_turned: [tokens, index heads, part of a head], the parts without and with rotation.
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

        q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], already rotated;
        sinks: [heads] fp32, logits in the softmax without values.
        returns: [tokens, heads, head_dim], same dtype as q.
        """
        ...

    def latent(
        self,
        spec: LatentSpec,
        q: Tensor,
        q_turned: Tensor,
        kept: tuple[Tensor, Tensor] | None,
        indexed: IndexerOutput | None = None,
    ) -> Tensor:
        """Write `kept`, latent and key, into the pages of this step's positions, then attend over
        each row's
        context: `ops.api.Ops.latent_attention`.

        q: [tokens, heads, rank]; q_turned: [tokens, heads, rope_dim]; kept: [tokens, rank] and
        [tokens, rope_dim], already rotated like q_turned; None = they are in the pages already.
        returns: [tokens, heads, rank], same dtype as q.
        """
        ...

    def latent_pages(self, layer: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Pages of a layer's latents and keys, and the location of each token in them, for a
        prologue that writes them before `latent`: `ops.prologue_api.LatentPrologue`."""
        ...


class StepStates(Protocol):
    """The states of one step's rows in the page store."""

    def __call__(self, layer: int) -> tuple[Mapping[str, Tensor], StateRows]:
        """States of a layer by declared name, and the rows' locations in them."""
        ...


@dataclass(frozen=True)
class FeatureRows:
    """Rows that take the place of the embeddings of some tokens.

    Attributes:
        where: [tokens] int32, row of `rows` for each token; negative = its embedding.
        rows: [any, width · (1 + deep)], at the scale of the residual stream. Part i > 0 is added
            to the stream after layer i - 1 (DeepStack, arXiv 2406.04334).
        width: of one part.
    """

    where: Tensor
    rows: Tensor
    width: int

    def replace(self, x: Tensor, ops: Ops) -> Tensor:
        """x: [tokens, width], the embeddings of all tokens."""
        return ops.take_rows(x, self.where, self.rows[:, : self.width])

    def add(self, x: Tensor, layer: int, ops: Ops) -> Tensor:
        """Add the part that belongs after `layer`, if there is one."""
        first = self.width * (layer + 1)
        if first >= self.rows.shape[1]:
            return x
        return ops.take_rows(x, self.where, self.rows[:, first : first + self.width], True)


@dataclass(frozen=True)
class CrossRow:
    """A row of a step and the content that it reads by cross attention.

    Attributes:
        first, end: its tokens.
        features: [feature rows, width].
    """

    first: int
    end: int
    features: Tensor


class AuxHiddenStates:
    """Collects the inputs of some layers (auxiliary hidden states, read by EAGLE-3 and DFlash).

    Args:
        layers: numbers of the layers.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._streams: list[Tensor] = []

    def take(
        self, layer: int, x: Tensor, residual: Tensor | None, ops: Ops, context: Group
    ) -> None:
        """Called before each layer, in order.

        x, residual: [tokens, hidden_size], the output of the previous block, and the stream without
        it.
        context: ranks that share the step's tokens.
        """
        count = self._layers.count(layer)
        if count:
            stream = x if residual is None else ops.add(x, residual)
            self._streams += [context.gather_rows(stream)] * count

    def of(self, tokens: Tensor) -> Tensor:
        """States of some tokens, [n] int64 along the step's: all layers concatenated."""
        assert len(self._streams) == len(self._layers), "the model has no such layers"
        return torch.cat([stream[tokens] for stream in self._streams], dim=-1)


class OutputTokens:
    """Selects the tokens with outputs after the last attention layer (output-token pruning). Keeps
    the unpruned tensors, so that a recorded graph can select other tokens later.

    Args:
        tokens: [n] int64, indices along the step's tokens.
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
    """Tensors of one step, on the device. Rows follow each other along `tokens`.

    Attributes:
        tokens: [tokens] int64 ids.
        positions: [tokens] int64, position of each token in its request.
        attention: attention bound to this step.
        states: states of recurrent layers.
        feature_rows: rows for the tokens whose ids are placeholders; None = there are none.
        cross: contents that rows read by cross attention; None = the model has none, or the step
            is recorded.
        shifts: [tokens, axes] int32, what each axis adds to a position (layers/rotary.py); None =
            positions have no axes.
        previous_states: [tokens, width], the target model's hidden state of the token before each
            (draft models), or the previous pipeline stage's output; None for other models.
        aux_hidden_states: collects inputs of layers; None = not wanted.
        output_tokens: the tokens whose hidden states are wanted; None = all. Only for models with
            `prunes_to_outputs`.
    """

    tokens: Tensor
    positions: Tensor
    attention: StepAttention
    states: StepStates
    feature_rows: FeatureRows | None = None
    cross: Sequence[CrossRow] | None = None
    shifts: Tensor | None = None
    previous_states: Tensor | None = None
    aux_hidden_states: AuxHiddenStates | None = None
    output_tokens: OutputTokens | None = None
