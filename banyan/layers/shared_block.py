"""Zamba2's shared blocks (arXiv 2411.15242): several layers share the weights of a few blocks of
attention and feed-forward.

A block reads the residual stream and the first layer's input. Each layer has its own KV cache and
its own low-rank projections on top of the shared ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from banyan.layers.attention import Attention, AttentionShape
from banyan.layers.build import Build
from banyan.layers.linear import ColumnLinear
from banyan.layers.mlp import GatedMLP
from banyan.layers.norm import RMSNorm
from banyan.layers.rotary import Angles
from banyan.layers.step_inputs import StepInputs
from banyan.layers.weight_slot import ShardRule
from banyan.model_config.model_config import ModelConfig
from banyan.parallel.groups import Group


class SharedBlock(nn.Module):
    """The weights that layers share; each layer runs them as a `SharedBlockLayer`.

    Args:
        shape: of the attention of any of these layers.
    """

    def __init__(self, model_config: ModelConfig, shape: AttentionShape, build: Build) -> None:
        super().__init__()
        attention, mlp = _attention(shape, build), _mlp(model_config, build)
        self.norm = RMSNorm(2 * model_config.hidden_size, model_config.norm_eps, build)
        self.qkv, self.out = cast(ColumnLinear, attention.qkv), attention.out
        self.mlp_norm = RMSNorm(model_config.hidden_size, model_config.norm_eps, build)
        self.gate_up, self.down = cast(ColumnLinear, mlp.gate_up), mlp.down


class SharedLinear(nn.Module):
    """A shared projection plus a layer's own low-rank projections.

    Args:
        parts: name of a low-rank pair -> parts of the shared projection that it adds to; together
            all parts in order.
        rank: of the low-rank pairs.
    """

    def __init__(
        self, shared: ColumnLinear, parts: Mapping[str, tuple[str, ...]], rank: int, build: Build
    ) -> None:
        super().__init__()
        self.ops, self.shared = build.ops, shared
        whole = {"": ShardRule()}
        self.into = nn.ModuleDict(
            {
                name: ColumnLinear(shared.inputs, {"": rank}, whole, False, shared.group, build)
                for name in parts
            }
        )
        self.back = nn.ModuleDict(
            {
                name: ColumnLinear(
                    rank,
                    {part: shared.outputs[part] for part in mine},
                    {part: shared.rules[part] for part in mine},
                    False,
                    shared.group,
                    build,
                )
                for name, mine in parts.items()
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, inputs]; returns [tokens, outputs of this rank]."""
        added = [self.back[name](into(x)) for name, into in self.into.items()]
        own = added[0] if len(added) == 1 else self.ops.concat(added)
        return self.ops.add(self.shared(x), own)


class SharedBlockLayer(nn.Module):
    """A shared block as one layer runs it.

    Args:
        shape: of its attention.
    """

    def __init__(
        self, model_config: ModelConfig, shape: AttentionShape, block: SharedBlock, build: Build
    ) -> None:
        super().__init__()
        facts, size = model_config.shared, model_config.hidden_size
        assert facts is not None
        self.ops, self.norm, self.mlp_norm = build.ops, block.norm, block.mlp_norm
        self.attention, self.mlp = _attention(shape, build), _mlp(model_config, build)
        self.attention.out, self.mlp.down = block.out, block.down
        self.attention.qkv = block.qkv
        if facts.has_attention_adapters:
            each = {part: (part,) for part in "qkv"}
            self.attention.qkv = SharedLinear(block.qkv, each, facts.rank, build)
        both = {"gate_up": ("gate", "up")}
        self.mlp.gate_up = SharedLinear(block.gate_up, both, facts.rank, build)
        self.linear = ColumnLinear(size, {"": size}, {"": ShardRule()}, False, Group(), build)

    def forward(
        self, stream: Tensor, first: Tensor, angles: Angles | None, step: StepInputs
    ) -> Tensor:
        """stream, and first, the first layer's input: [tokens, dim]; returns the same shape, which
        the layer reads in addition to the stream."""
        x = self.norm(self.ops.concat([stream, first]))
        x = self.mlp_norm(self.attention(x, angles, step))
        return self.linear(self.mlp(x))


def _attention(shape: AttentionShape, build: Build) -> Attention:
    return Attention(replace(shape, reads=2 * shape.dim), build)


def _mlp(model_config: ModelConfig, build: Build) -> GatedMLP:
    sizes = (
        model_config.hidden_size,
        model_config.intermediate_size,
        model_config.hidden_act,
        model_config.mlp_bias,
    )
    return GatedMLP(*sizes, build.groups.ffn, build)
