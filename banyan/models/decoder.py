"""DecoderLM: the common decoder-only transformer, its sizes from the card, its names from a spec.

Pre-norm blocks of attention and gated MLP around a residual stream. Knows no files.
"""

import torch
from torch import Tensor, nn

from banyan.config.card import WINDOW, ModelCard
from banyan.layers.attention import Attention, AttentionShape
from banyan.layers.embedding import Embedding, Logits
from banyan.layers.mlp import GatedMLP
from banyan.layers.norm import RMSNorm
from banyan.layers.rotary import Rotary
from banyan.layers.step import StepInputs
from banyan.ops.api import Ops
from banyan.parallel.mesh import Mesh


class DecoderLayer(nn.Module):
    def __init__(
        self,
        card: ModelCard,
        layer: int,
        mesh: Mesh,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        shape = AttentionShape(
            layer=layer,
            group=group_of(card, layer),
            dim=card.hidden_size,
            heads=card.num_heads,
            kv_heads=card.num_kv_heads,
            head_dim=card.head_dim,
            window=card.window if card.kind_of(layer) == WINDOW else 0,
            has_bias=card.attention_bias,
            has_output_bias=card.output_bias,
        )
        self.attention_norm = RMSNorm(card.hidden_size, card.norm_eps, ops, dtype, device)
        self.attention = Attention(shape, mesh, ops, dtype, device)
        self.mlp_norm = RMSNorm(card.hidden_size, card.norm_eps, ops, dtype, device)
        self.mlp = GatedMLP(
            card.hidden_size,
            card.intermediate_size,
            card.hidden_act,
            card.mlp_bias,
            mesh,
            ops,
            dtype,
            device,
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """x: what the block before adds to the residual stream, None before the first block;
        returns the same two."""
        x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, cos, sin, step)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


class DecoderLM(nn.Module):
    """One rank's share of a model. Empty until `models.weights.loader` has filled it."""

    def __init__(
        self, card: ModelCard, mesh: Mesh, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.card = card
        self.dtype = dtype
        self.embedding = Embedding(card.vocab_size, card.hidden_size, mesh, ops)
        self.rotary = Rotary(card.head_dim, card.rope, card.context_length, ops, device)
        self.layers = nn.ModuleList(
            DecoderLayer(card, layer, mesh, ops, dtype, device) for layer in range(card.num_layers)
        )
        self.norm = RMSNorm(card.hidden_size, card.norm_eps, ops, dtype, device)
        self.head = Logits(card.vocab_size, card.hidden_size, mesh, ops)

    def forward(self, step: StepInputs) -> Tensor:
        """returns: hidden states after the last norm, [tokens, hidden_size]."""
        cos, sin = self.rotary(step.positions)
        x = self.embedding(step.tokens)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, step)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size]; returns [n, vocab_size] fp32, the same on every rank."""
        return self.head(hidden)


def group_of(card: ModelCard, layer: int) -> int:
    """Cache group of a layer: the kinds of a model are numbered by first appearance."""
    kinds = list(dict.fromkeys(card.kind_of(index) for index in range(card.num_layers)))
    return kinds.index(card.kind_of(layer))
