"""DecoderLM: the common decoder-only transformer, its sizes from the card, its form from a family.

Blocks of attention and feed-forward around a residual stream. Constants that only scale are folded
where they cost nothing: a factor r on what joins the stream is a stream that is r times smaller,
which a norm does not see but for its eps. Knows no files.
"""

from typing import cast

from torch import Tensor, nn

from banyan.families.base import Family
from banyan.layers.attention import Attention, AttentionShape
from banyan.layers.build import Build
from banyan.layers.cache_spec import LayerCache, caches_of
from banyan.layers.embedding import Embedding, Logits
from banyan.layers.gated_delta_net import GatedDeltaNet
from banyan.layers.kimi_delta_attention import DeltaByKey
from banyan.layers.latent_attention import LatentAttention, LatentShape
from banyan.layers.lightning_attention import LightningAttention
from banyan.layers.linear import ColumnLinear
from banyan.layers.mamba import SelectiveState
from banyan.layers.mamba2 import StateSpace
from banyan.layers.mlp import GatedMLP, PlainMLP
from banyan.layers.norm import LayerNorm, RMSNorm, Stream, Sum
from banyan.layers.rotary import Angles, Rotary
from banyan.layers.shared_block import SharedBlock, Taking
from banyan.layers.short_conv import GatedConv
from banyan.layers.step_inputs import Chosen, StepInputs
from banyan.layers.weight_slot import ShardRule
from banyan.model_config.model_config import BOTH, NONE, STATE, WINDOW, ModelConfig
from banyan.moe.layer import ExpertBlock
from banyan.parallel.groups import Group

Keeping = GatedConv | StateSpace | GatedDeltaNet | DeltaByKey | SelectiveState | LightningAttention
"""What mixes tokens by a state."""
_MIXERS = {
    "scan": StateSpace,
    "delta": GatedDeltaNet,
    "delta by key": DeltaByKey,
    "selective": SelectiveState,
    "lightning": LightningAttention,
}


class DecoderLayer(nn.Module):
    """
    Args:
        card, family: of the whole model.
        layer: index of this block.
        block: that it shares with others; None = it has all weights for itself.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        family: Family,
        layer: int,
        build: Build,
        block: SharedBlock | None = None,
    ) -> None:
        super().__init__()
        self.ops = build.ops
        self.rope = model_config.rope_of(layer)
        self.is_parallel = family.parallel
        self.is_normed = model_config.normed_stream is not None
        before, between = _joins_before(model_config, layer)
        self.attention_norm = _stream(model_config, family, build, before)
        self.attention = None
        if model_config.kind_of(layer) != NONE and block is None:
            self.attention = _attention(model_config, family, layer, build)
        beside = (
            model_config.num_layers + layer
        )  # numbers its states apart from the keys and values
        is_both = model_config.kind_of(layer) == BOTH
        state = _keeping(model_config, beside, build) if is_both else None
        self.shared, self.state = None, state
        if block is not None:
            shape = attention_shape(model_config, family, layer)
            self.shared = Taking(model_config, shape, block, build)
            self.attention, self.state = state, None
        self.attention_post_norm = _post_norm(model_config, family, build)
        self.mlp = _feed_forward(model_config, family, layer, build)
        has_both = self.mlp is not None and self.attention is not None
        has_norm = has_both and not family.parallel
        self.mlp_norm = _stream(model_config, family, build, between) if has_norm else None
        self.mlp_post_norm = _post_norm(model_config, family, build)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        angles: Angles | None,
        step: StepInputs,
        first: Tensor | None = None,
        chosen: Chosen | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x: what the block before adds to the residual stream, None before the first block;
        first: what the first layer read; returns the same two, of those chosen where some are."""
        attended, x, residual = self._mix(x, residual, angles, step, first)
        if chosen is not None:
            residual = chosen.of(residual, self.ops)
            if attended is not None:
                attended = chosen.of(attended, self.ops)
            if self.mlp_norm is None:
                x = chosen.of(x, self.ops)
        return self._feed(attended, x, residual)

    def _mix(
        self,
        x: Tensor,
        residual: Tensor | None,
        angles: Angles | None,
        step: StepInputs,
        first: Tensor | None,
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """What reads other tokens: what it makes of them (None where nothing does), what it read,
        and the residual stream."""
        if self.shared is not None:
            stream = x if residual is None else self.ops.add(x, residual)
            assert self.attention is not None and first is not None
            x, _ = self.attention_norm.add(self.shared(stream, first, angles, step), stream)
            return self.attention(x, angles, step), x, stream
        x, residual = self.attention_norm.add(x, residual)
        residual = x if self.is_normed else residual
        if self.attention is None:
            return None, x, residual
        attended = self.attention(x, angles, step)
        if self.state is not None:
            attended = self.ops.add(attended, self.state(x, angles, step))
        return attended, x, residual

    def _feed(self, attended: Tensor | None, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What follows, in which each token is by itself."""
        if attended is None:
            assert self.mlp is not None, "a layer of nothing"
            return self.mlp(x), residual
        if self.mlp is None:
            return attended, residual
        if self.mlp_norm is None:
            return self.ops.add(attended, self.mlp(x)), residual
        mixed = attended
        if self.attention_post_norm is not None:
            mixed = self.attention_post_norm(attended)
        x, residual = self.mlp_norm.add(mixed, residual)
        residual = x if self.is_normed else residual
        x = self.mlp(x)
        return (x if self.mlp_post_norm is None else self.mlp_post_norm(x)), residual


class DecoderLM(nn.Module):
    """One rank's share of a model. Empty until `models.weights.loader` has filled it.

    Args:
        served_length: longest request in tokens; 0 = the card's context length.
    """

    narrows = True

    def __init__(
        self, model_config: ModelConfig, family: Family, build: Build, served_length: int = 0
    ) -> None:
        super().__init__()
        self.model_config = model_config
        self.dtype = build.dtype
        size, vocab = model_config.hidden_size, model_config.vocab_size
        scale = model_config.embedding_scale / model_config.residual_scale
        self.embedding = Embedding(vocab, size, build, scale)
        self.ops = build.ops
        self.stages, self.context = build.groups.stages, build.groups.context
        self.stage = stage_of(model_config.num_layers, self.stages)
        self.shared = nn.ModuleList(
            _shared(model_config, family, build)
        )  # before layers: it names them
        self.layers = nn.ModuleList(
            DecoderLayer(model_config, family, layer, build, self._block_of(layer))
            if layer in self.stage
            else nn.Identity()
            for layer in range(model_config.num_layers)
        )
        self.caches: list[LayerCache] = caches_of(self)
        self.rotaries = {
            rope: Rotary(
                rope.dim or model_config.rotary_dim or model_config.head_dim,
                rope,
                model_config.context_length,
                served_length or model_config.context_length,
                build.ops,
                build.device,
            )
            for rope in dict.fromkeys(model_config.rope_of(layer) for layer in self.stage)
            if rope.kind != "none"
        }
        last = _stream_eps(model_config, _joins_before(model_config, model_config.num_layers)[0])
        self.norm = _norm(model_config, family, last, build)
        self.head: Logits | ColumnLinear | None = None
        if model_config.labels:
            rules = {"": ShardRule()}
            self.head = ColumnLinear(
                size, {"": len(model_config.labels)}, rules, False, Group(), build
            )
        elif model_config.pooling is None:
            self.head = Logits(
                *(vocab, size, build, model_config.logit_scale, model_config.logit_cap),
                *(model_config.head_bias, model_config.has_normed_head),
            )

    def forward(self, step: StepInputs) -> Tensor:
        """returns: hidden states after the last norm, [tokens, hidden_size], of all ranks that
        share the step's tokens, or of those chosen; of a stage before the last one what the next
        one goes on with, as `step.carried`."""
        angles = {rope: rotary(step.positions) for rope, rotary in self.rotaries.items()}
        stages = self.stages
        x, residual = step.carried, None
        if stages.rank == 0:
            x = self.embedding(step.tokens, step.embedded)
        assert x is not None, "nothing has come from the stage before"
        first = x
        for number in self.stage:
            if step.taps is not None:
                step.taps.take(number, x, residual, self.ops, self.context)
            layer = cast(DecoderLayer, self.layers[number])
            chosen = step.chosen if number == self.model_config.num_layers - 1 else None
            x, residual = layer(x, residual, angles.get(layer.rope), step, first, chosen)
        if stages.rank == stages.size - 1:
            return self.context.gather_rows(self.norm.add(x, residual)[0])
        return x if residual is None else self.ops.add(x, residual)

    def _block_of(self, layer: int) -> SharedBlock | None:
        takers = self.model_config.takers if self.shared else ()
        if layer not in takers:
            return None
        return cast(SharedBlock, self.shared[takers.index(layer) % len(self.shared)])

    def classify(self, pooled: Tensor) -> Tensor:
        """pooled: [n, hidden_size]; returns scores [n, classes], or the states where none are."""
        return pooled if self.head is None else self.head(pooled)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size]; returns [n, vocab_size] fp32, the same on every rank."""
        assert self.head is not None, "a model for vectors has no logits"
        return self.head(hidden)


def stage_of(num_layers: int, stages: Group) -> range:
    """The layers of this rank's stage."""
    return layers_of(num_layers, stages.rank, stages.size)


def layers_of(num_layers: int, stage: int, stages: int) -> range:
    """The layers of one of so many stages."""
    first, last = (num_layers * at // stages for at in (stage, stage + 1))
    return range(first, last)


def _shared(model_config: ModelConfig, family: Family, build: Build) -> list[SharedBlock]:
    """The blocks that layers take in turns."""
    if model_config.shared is None:
        return []
    shape = attention_shape(model_config, family, model_config.takers[0])
    return [SharedBlock(model_config, shape, build) for _ in range(model_config.shared.blocks)]


def _feed_forward(
    model_config: ModelConfig, family: Family, layer: int, build: Build
) -> GatedMLP | PlainMLP | ExpertBlock | None:
    """None where a layer does nothing but mix tokens."""
    mixes_only = family.has_single_parts and model_config.kind_of(layer) != NONE
    if not model_config.intermediate_size or mixes_only:
        return None
    if model_config.experts is not None and layer not in model_config.experts.dense_layers:
        sizes = (
            model_config.hidden_size,
            model_config.experts,
            model_config.hidden_act,
            build,
            layer,
        )
        return ExpertBlock(*sizes, model_config.mlp_limit_of(layer))
    group = build.groups.ffn if model_config.experts is None else build.groups.dense_ffn
    sizes = (
        model_config.hidden_size,
        model_config.intermediate_size,
        model_config.hidden_act,
        model_config.mlp_bias,
    )
    if not family.gated:
        return PlainMLP(*sizes, group, build)
    factors = (model_config.gate_factor, model_config.up_factor)
    return GatedMLP(*sizes, group, build, factors, model_config.mlp_limit_of(layer))


def _attention(
    model_config: ModelConfig, family: Family, layer: int, build: Build
) -> Attention | LatentAttention | Keeping:
    """What mixes tokens in this layer."""
    if model_config.kind_of(layer) == STATE:
        return _keeping(model_config, layer, build)
    if model_config.latent is not None:
        shape = LatentShape(
            layer=layer,
            dim=model_config.hidden_size,
            heads=model_config.num_heads,
            facts=model_config.latent,
            scale=model_config.attention_scale or model_config.head_dim**-0.5,
            norm_eps=model_config.norm_eps,
            has_bias=model_config.attention_bias,
        )
        return LatentAttention(shape, build)
    return Attention(attention_shape(model_config, family, layer), build)


def attention_shape(model_config: ModelConfig, family: Family, layer: int) -> AttentionShape:
    """Of a layer that keeps keys and values per head."""
    return AttentionShape(
        layer=layer,
        dim=model_config.hidden_size,
        heads=model_config.heads_of(layer),
        kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        scale=model_config.attention_scale or model_config.head_dim**-0.5,
        window=model_config.window if model_config.kind_of(layer) == WINDOW else 0,
        soft_cap=model_config.attention_cap,
        has_bias=model_config.attention_bias,
        has_output_bias=model_config.output_bias,
        qk_norm=model_config.qk_norm or family.qk_norm,
        norm_eps=model_config.norm_eps,
        rotary_dim=model_config.rotary_dim_of(layer),
        has_sinks=model_config.attention_sinks,
        is_gated=family.has_attention_gate,
        has_head_gates=model_config.has_head_gates,
        query_rank=model_config.query_rank,
        factor=model_config.attention_factor,
    )


def _keeping(model_config: ModelConfig, layer: int, build: Build) -> Keeping:
    """What mixes tokens by a state."""
    facts, dim = model_config.state, model_config.hidden_size
    assert facts is not None, f"layer {layer} keeps a state of which the card says nothing"
    if facts.mixer == "conv":
        return GatedConv(layer, dim, facts, build)
    mixer = _MIXERS[facts.mixer]
    return mixer(layer, dim, facts, model_config.norm_eps, build)


def _joins_before(model_config: ModelConfig, layer: int) -> tuple[float, float]:
    """Factors on a normed stream where blocks have joined it: before a layer, and between what
    mixes tokens in it and its feed-forward block."""
    facts = model_config.normed_stream
    if facts is None:
        return 1.0, 1.0
    is_state = layer < model_config.num_layers and model_config.kind_of(layer) == STATE
    return facts.mlp if layer else 1.0, facts.state if is_state else facts.full


def _stream_eps(model_config: ModelConfig, factor: float = 1.0) -> float:
    """eps of norms of the residual stream, which is kept 1/residual_scale times as large, and
    as much smaller as a factor on all of it says."""
    return model_config.norm_eps / (model_config.residual_scale * factor) ** 2


def _stream(model_config: ModelConfig, family: Family, build: Build, factor: float) -> Stream:
    if not family.pre_norm:
        return Sum(build.ops)
    return _norm(model_config, family, _stream_eps(model_config, factor), build)


def _post_norm(
    model_config: ModelConfig, family: Family, build: Build
) -> RMSNorm | LayerNorm | None:
    return _norm(model_config, family, model_config.norm_eps, build) if family.post_norm else None


def _norm(
    model_config: ModelConfig, family: Family, eps: float, build: Build
) -> RMSNorm | LayerNorm:
    if family.norm == "rms":
        return RMSNorm(model_config.hidden_size, eps, build)
    return LayerNorm(model_config.hidden_size, eps, family.norm == "layer+bias", build)
