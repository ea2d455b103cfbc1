"""DecoderLM: the common decoder-only transformer; sizes come from the model config, the form from
the family.

Blocks of attention and feed-forward around a residual stream. Constant factors are folded where
they cost nothing: a factor r on what is added to the stream becomes a stream that is r times
smaller, which norms ignore except for their eps.
"""

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from banyan.base.errors import ModelError
from banyan.families.base import Family
from banyan.layers.attention import Attention, AttentionShape
from banyan.layers.build import Build
from banyan.layers.cache_spec import LayerCache, caches_of
from banyan.layers.embedding import Embedding, Logits, PositionTable
from banyan.layers.latent_attention import LatentAttention, LatentShape
from banyan.layers.linear import ColumnLinear
from banyan.layers.linear_attention import GatedDeltaNet, KimiDeltaAttention, LightningAttention
from banyan.layers.mamba import Mamba, Mamba2
from banyan.layers.mlp import GatedMLP, PlainMLP
from banyan.layers.norm import LayerNorm, ResidualNorm, ResidualSum, RMSNorm
from banyan.layers.recurrent import GatedConv
from banyan.layers.rotary import Angles, Rotary
from banyan.layers.shared_block import SharedBlock, SharedBlockLayer
from banyan.layers.step_inputs import OutputTokens, StepInputs
from banyan.layers.weight_slot import ShardRule
from banyan.model_config.model_config import BOTH, NONE, STATE, WINDOW, ModelConfig
from banyan.models.towers.vision import Tower
from banyan.moe.layer import ExpertBlock
from banyan.parallel.groups import Group

StateLayer = GatedConv | Mamba2 | GatedDeltaNet | KimiDeltaAttention | Mamba | LightningAttention
"""Layers that mix tokens through a recurrent state."""
_MIXERS = {
    "scan": Mamba2,
    "delta": GatedDeltaNet,
    "delta by key": KimiDeltaAttention,
    "selective": Mamba,
    "lightning": LightningAttention,
}


class DecoderLayer(nn.Module):
    """Args:
    model_config, family: of the whole model.
    layer: index of this block.
    block: weights that it shares with other layers; None = all weights are its own.
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
        parallel = family.parallel if model_config.parallel is None else model_config.parallel
        self.is_normed = model_config.normed_stream is not None
        self.starts_normed = family.starts_normed and layer == 0
        before, between = _stream_factors(model_config, layer)
        self.attention_norm = _stream(model_config, family, build, before)
        self.attention = None
        if model_config.kind_of(layer) != NONE and block is None:
            self.attention = _attention(model_config, family, layer, build)
        number = model_config.num_layers + layer  # keys and values of the layer have `layer`
        is_both = model_config.kind_of(layer) == BOTH
        state = _state_layer(model_config, number, build) if is_both else None
        self.shared, self.state = None, state
        if block is not None:
            shape = attention_shape(model_config, family, layer)
            self.shared = SharedBlockLayer(model_config, shape, block, build)
            self.attention, self.state = state, None
        self.attention_post_norm = _post_norm(model_config, family, build)
        self.mlp = _feed_forward(model_config, family, layer, build)
        has_both = self.mlp is not None and self.attention is not None
        self.mlp_norm = self.parallel_norm = None
        if has_both and not parallel:
            self.mlp_norm = _stream(model_config, family, build, between)
        elif has_both and parallel == "two norms":
            norm = _norm(model_config, family, _stream_eps(model_config), build)
            self.mlp_norm = self.parallel_norm = norm
        self.mlp_post_norm = _post_norm(model_config, family, build)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        angles: Angles | None,
        step: StepInputs,
        first: Tensor | None = None,
        output_tokens: OutputTokens | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x: output of the previous block, None before the first block; residual: the stream
        without it;
        first: the first layer's input; returns the same two, for `output_tokens` only if given."""
        attended, x, residual = self._mix(x, residual, angles, step, first)
        if output_tokens is not None:
            residual = output_tokens.of(residual, self.ops)
            if attended is not None:
                attended = output_tokens.of(attended, self.ops)
            if self.mlp_norm is None:
                x = output_tokens.of(x, self.ops)
        return self._feed(attended, x, residual)

    def _mix(
        self,
        x: Tensor,
        residual: Tensor | None,
        angles: Angles | None,
        step: StepInputs,
        first: Tensor | None,
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Attention or state layer: its output (None if the layer has neither), its input, and the
        residual stream."""
        if self.shared is not None:
            stream = x if residual is None else self.ops.add(x, residual)
            assert self.attention is not None and first is not None
            x, _ = self.attention_norm.add(self.shared(stream, first, angles, step), stream)
            return self.attention(x, angles, step), x, stream
        x, residual = self.attention_norm.add(x, residual)
        residual = x if self.is_normed or self.starts_normed else residual
        if self.attention is None:
            return None, x, residual
        attended = self.attention(x, angles, step)
        if self.state is not None:
            attended = self.ops.add(attended, self.state(x, angles, step))
        return attended, x, residual

    def _feed(self, attended: Tensor | None, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The rest of the layer, which processes each token by itself."""
        if attended is None:
            assert self.mlp is not None, "a layer without any part"
            return self.mlp(x), residual
        if self.mlp is None:
            return attended, residual
        if self.mlp_norm is None or self.parallel_norm is not None:
            x = x if self.parallel_norm is None else self.parallel_norm(residual)
            return self.ops.add(attended, self.mlp(x)), residual
        mixed = attended
        if self.attention_post_norm is not None:
            mixed = self.attention_post_norm(attended)
        x, residual = self.mlp_norm.add(mixed, residual)
        residual = x if self.is_normed else residual
        x = self.mlp(x)
        return (x if self.mlp_post_norm is None else self.mlp_post_norm(x)), residual


class DecoderLM(nn.Module):
    """One rank's part of a model. Empty until `models.weights.loader` has filled it.

    Args:
        served_length: longest request in tokens; 0 = the model's context length.
    """

    takes_features = True

    def __init__(
        self, model_config: ModelConfig, family: Family, build: Build, served_length: int = 0
    ) -> None:
        super().__init__()
        self.model_config = model_config
        self.dtype = build.dtype
        size, vocab = model_config.hidden_size, model_config.vocab_size
        scale = model_config.embedding_scale / model_config.residual_scale
        self.embedding = Embedding(vocab, size, build, scale)
        self.tower_modules = nn.ModuleDict()
        """Content kind -> what makes features of it; filled when the weights are loaded."""
        self.positions: PositionTable | None = None
        if model_config.positions:
            count, skipped = model_config.context_length, model_config.first_position
            self.positions = PositionTable(model_config.positions, count, skipped, size, build)
        eps = _stream_eps(model_config)
        self.embedding_norm = (
            _norm(model_config, family, eps, build) if family.embedding_norm else None
        )
        self.ops = build.ops
        self.stages, self.context = build.groups.stages, build.groups.context
        self.stage = stage_of(model_config.num_layers, self.stages)
        deep = 0 if model_config.media is None else len(model_config.media.deep_blocks)
        if deep > len(self.stage) and self.stages.rank == 0 and self.stages.size > 1:
            raise ModelError(
                f"{deep} layers take features, and the first of {self.stages.size} pipeline stages "
                f"has {len(self.stage)}",
                hint="give fewer stages, or --language-model-only",
            )
        self.prunes_to_outputs = deep < model_config.num_layers
        self.shared = nn.ModuleList(
            _shared(model_config, family, build)
        )  # before layers: it names them
        self.layers = nn.ModuleList(
            DecoderLayer(model_config, family, layer, build, self._block_of(layer))
            if layer in self.stage
            else nn.Identity()
            for layer in range(model_config.num_layers)
        )
        self.caches: list[LayerCache] = [] if model_config.is_encoder else caches_of(self)
        self.rotaries = {
            rope: Rotary(
                rope.dim or model_config.rotary_dim or model_config.head_dim,
                rope,
                model_config.context_length,
                served_length or model_config.context_length,
                build.ops,
                build.device,
                () if model_config.media is None else model_config.media.axes,
            )
            for rope in dict.fromkeys(model_config.rope_of(layer) for layer in self.stage)
            if rope.kind != "none"
        }
        last = _stream_eps(model_config, _stream_factors(model_config, model_config.num_layers)[0])
        self.norm = _norm(model_config, family, last, build)
        self.head: Logits | ColumnLinear | None = None
        if model_config.labels:
            rules = {"": ShardRule()}
            self.head = ColumnLinear(
                size, {"": len(model_config.labels)}, rules, False, Group(), build
            )
        elif model_config.pooling is None:
            self.head = Logits(
                vocab,
                size,
                build,
                model_config.logit_scale,
                model_config.logit_cap,
                model_config.head_bias,
                model_config.has_normed_head,
            )

    @property
    def towers(self) -> Mapping[str, Tower]:
        """See `Model`."""
        return {kind: cast(Tower, module) for kind, module in self.tower_modules.items()}

    def forward(self, step: StepInputs) -> Tensor:
        """returns: hidden states after the last norm, [tokens, hidden_size], of all ranks that
        share the step's tokens, or of `output_tokens` only. A stage before the last returns the
        input of the next stage (`step.previous_states`)."""
        angles = {
            rope: rotary(step.positions, step.shifts) for rope, rotary in self.rotaries.items()
        }
        stages = self.stages
        x, residual = step.previous_states, None
        if stages.rank == 0:
            x = self._embed(step)
        assert x is not None, "the previous stage sent nothing"
        first = x
        for number in self.stage:
            if step.aux_hidden_states is not None:
                step.aux_hidden_states.take(number, x, residual, self.ops, self.context)
            layer = cast(DecoderLayer, self.layers[number])
            output_tokens = (
                step.output_tokens if number == self.model_config.num_layers - 1 else None
            )
            x, residual = layer(x, residual, angles.get(layer.rope), step, first, output_tokens)
            if step.feature_rows is not None and output_tokens is None:
                x = step.feature_rows.add(x, number, self.ops)
        if stages.rank == stages.size - 1:
            return self.context.gather_rows(self.norm.add(x, residual)[0])
        return x if residual is None else self.ops.add(x, residual)

    def _embed(self, step: StepInputs) -> Tensor:
        """The input of the first layer, [tokens, hidden_size]."""
        x = self.embedding(step.tokens, step.feature_rows)
        if self.positions is not None:
            x = self.ops.add(x, self.positions(step.positions))
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _block_of(self, layer: int) -> SharedBlock | None:
        hybrid_layers = self.model_config.hybrid_layers if self.shared else ()
        if layer not in hybrid_layers:
            return None
        return cast(SharedBlock, self.shared[hybrid_layers.index(layer) % len(self.shared)])

    def classify(self, pooled: Tensor) -> Tensor:
        """pooled: [n, hidden_size]; returns scores [n, classes], or `pooled` if there are no
        classes."""
        return pooled if self.head is None else self.head(pooled)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size]; returns [n, vocab_size] fp32, the same on every rank."""
        assert self.head is not None, "an embedding model has no logits"
        return self.head(hidden)


def stage_of(num_layers: int, stages: Group) -> range:
    """The layers of this rank's stage."""
    return layers_of(num_layers, stages.rank, stages.size)


def layers_of(num_layers: int, stage: int, stages: int) -> range:
    """The layers of one of `stages` stages."""
    first, last = (num_layers * at // stages for at in (stage, stage + 1))
    return range(first, last)


def _shared(model_config: ModelConfig, family: Family, build: Build) -> list[SharedBlock]:
    """The blocks whose weights layers share."""
    if model_config.shared is None:
        return []
    shape = attention_shape(model_config, family, model_config.hybrid_layers[0])
    return [SharedBlock(model_config, shape, build) for _ in range(model_config.shared.blocks)]


def _feed_forward(
    model_config: ModelConfig, family: Family, layer: int, build: Build
) -> GatedMLP | PlainMLP | ExpertBlock | None:
    """None if a layer only mixes tokens."""
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
) -> Attention | LatentAttention | StateLayer:
    """The layer that mixes tokens."""
    if model_config.kind_of(layer) == STATE:
        return _state_layer(model_config, layer, build)
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
    """Attention sizes of a layer that keeps keys and values per head."""
    qk_norm = model_config.qk_norm or family.qk_norm
    if qk_norm == "unit" and model_config.rope_of(layer).kind == "none":
        qk_norm = ""
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
        qk_norm=qk_norm,
        norm_eps=model_config.norm_eps,
        rotary_dim=model_config.rotary_dim_of(layer),
        has_sinks=model_config.attention_sinks,
        is_gated=family.has_attention_gate,
        has_head_gates=model_config.has_head_gates,
        has_wide_gates=model_config.has_wide_gates,
        alibi=model_config.alibi,
        qkv_limit=model_config.qkv_limit,
        query_rank=model_config.query_rank,
        factor=model_config.attention_factor,
    )


def _state_layer(model_config: ModelConfig, layer: int, build: Build) -> StateLayer:
    """The layer that mixes tokens through a state."""
    facts, dim = model_config.state, model_config.hidden_size
    assert facts is not None, f"layer {layer} keeps a state that the model config does not describe"
    if facts.mixer == "conv":
        return GatedConv(layer, dim, facts, build)
    mixer = _MIXERS[facts.mixer]
    return mixer(layer, dim, facts, model_config.norm_eps, build)


def _stream_factors(model_config: ModelConfig, layer: int) -> tuple[float, float]:
    """Factors on a normed residual stream: before a layer, and between its attention and its
    feed-forward block."""
    facts = model_config.normed_stream
    if facts is None:
        return 1.0, 1.0
    is_state = layer < model_config.num_layers and model_config.kind_of(layer) == STATE
    return facts.mlp if layer else 1.0, facts.state if is_state else facts.full


def _stream_eps(model_config: ModelConfig, factor: float = 1.0) -> float:
    """eps of norms of the residual stream, which is stored divided by residual_scale and by
    `factor`."""
    return model_config.norm_eps / (model_config.residual_scale * factor) ** 2


def _stream(model_config: ModelConfig, family: Family, build: Build, factor: float) -> ResidualNorm:
    if not family.pre_norm:
        return ResidualSum(build.ops)
    return _norm(model_config, family, _stream_eps(model_config, factor), build)


def _post_norm(
    model_config: ModelConfig, family: Family, build: Build
) -> RMSNorm | LayerNorm | None:
    has_norm = family.post_norm if model_config.post_norm is None else model_config.post_norm
    return _norm(model_config, family, model_config.norm_eps, build) if has_norm else None


def _norm(
    model_config: ModelConfig, family: Family, eps: float, build: Build
) -> RMSNorm | LayerNorm:
    has_weight, size = not family.norm.startswith("bare"), model_config.hidden_size
    if family.norm.endswith("rms"):
        return RMSNorm(size, eps, build, has_weight)
    has_bias = family.norm == "layer+bias"
    return LayerNorm(size, eps, has_bias, build, has_weight=has_weight)
