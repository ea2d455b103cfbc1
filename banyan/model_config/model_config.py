"""ModelConfig: the architecture and sizes of a model, the same for GGUF and safetensors.

`model_config/checkpoint.py` reads it from files.
"""

import math
from dataclasses import dataclass, field

from banyan.model_config.media import MediaConfig

FULL = "full"
"""Full attention: a layer reads every position of the request."""
WINDOW = "window"
"""Sliding window: a layer reads the last `window` positions. Older pages are freed early."""
STATE = "state"
"""A layer keeps one recurrent state of the whole prefix; checkpoints of it allow resuming."""
BOTH = "full and state"
"""Full attention and a state in one layer: both read the same input, their outputs are added."""
NONE = "none"
"""A layer has no token mixer and no cache."""
ALIBI_DIMS = 2
"""Dimensions that ALiBi adds to queries and keys."""


@dataclass(frozen=True)
class RopeFacts:
    """Rotary embedding: base frequency and how it is stretched beyond the trained length.

    `kind` is none (no rotation) | default | linear | dynamic | llama3 | yarn | longrope; the other
    numbers keep the names and meaning of the Hugging Face `rope_scaling` dictionary (Llama 3, YaRN
    and LongRoPE papers).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency if requests stay within the original length."""
    long_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency if requests may be longer."""
    dim: int = 0
    """Leading dimensions of a head that rotate; 0 = `ModelConfig.rotary_dim`."""
    short_mscale: float = 0.0
    """longrope: factor on cos and sin with `short_factor`; used if both factors are given."""
    is_backward: bool = False
    """Rotation in the other direction."""
    long_mscale: float = 0.0
    """longrope: factor on cos and sin with `long_factor`."""


@dataclass(frozen=True)
class LatentFacts:
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): keys and values of all
    heads come from one latent vector per token. The cache keeps that vector.

    Attributes:
        query_rank: rank of the query projection; 0 = one full projection.
        rank: width of the latent vector.
        plain_dim, rope_dim: dimensions of a query or key head without and with rotation.
        value_dim: width of a value head.
        index_heads, index_dim: heads of the indexer (sparse attention) and their width, rope_dim of
            it rotated; 0 = no indexer.
        index_top: positions that the indexer chooses for a token.
        norm_eps: eps of the norms of latents and low-rank queries; 0 = the model's.
    """

    query_rank: int
    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    index_heads: int = 0
    index_dim: int = 0
    index_top: int = 0
    norm_eps: float = 0.0


@dataclass(frozen=True)
class StateFacts:
    """The token mixer of "state" layers.

    Attributes:
        mixer: "conv" (gated short convolution, LFM2) | "scan" (Mamba-2) | "delta" (gated delta
            net) | "delta by key" (delta net with a decay per key dimension, Kimi) |
            "selective" (Mamba, whose channels are heads) | "lightning" (linear attention whose
            heads forget at fixed rates, MiniMax).
        conv_kernel: size of the convolution kernel; 0 = no convolution.
        has_conv_bias, has_bias: bias of the convolution; of the projections around it.
        heads, key_heads: value heads; key and query heads, shared by groups of value heads.
        key_dim, value_dim: head sizes; a head's state is [key_dim, value_dim].
        least_step, most_step: bounds of the time step (dt).
        is_grouped: the rows of a delta net's projections are ordered by key head.
        has_grouped_rates: the rows of its rate projection are ordered by key head too.
        is_tiled: value heads of the last projections are interleaved over the key heads (GGUF files
            of Qwen3.5).
        step_rank: "selective": rank of the time step projection.
        has_part_norms: "selective": time steps, keys and queries are normed.
        norm: norm of a scan's head outputs: "gated" (after the gate) | "plain" (before it) | "".
        norm_eps: eps of that norm; 0 = the model's.
        factors: factors on a scan's projected gate, values, keys, queries, time steps.
        factor: factor on the layer's output.
        depth: number of layers; deeper "lightning" layers decay more slowly.
    """

    mixer: str
    conv_kernel: int
    has_conv_bias: bool = False
    has_bias: bool = False
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    least_step: float = 0.0
    most_step: float = math.inf
    is_grouped: bool = True
    has_grouped_rates: bool = True
    is_tiled: bool = False
    step_rank: int = 0
    has_part_norms: bool = False
    norm: str = "gated"
    factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    factor: float = 1.0
    norm_eps: float = 0.0
    depth: int = 0

    def units(self, hidden_size: int) -> int:
        """The count that ranks divide among themselves: channels, or heads with their own keys."""
        if self.mixer == "conv":
            return hidden_size
        return self.key_heads if self.mixer == "delta" else self.heads


@dataclass(frozen=True)
class SharedFacts:
    """Attention and feed-forward blocks whose weights "full and state" layers share in turns; each
    runs before the layer's state (Zamba2).

    Attributes:
        blocks: number of shared blocks in the model.
        rank: rank of the adapters that each layer adds to a shared block.
        has_attention_adapters: queries, keys and values have adapters too.
    """

    blocks: int
    rank: int
    has_attention_adapters: bool = False


@dataclass(frozen=True)
class NormedStream:
    """The residual stream is the normed one: a block's output is added to the input after its norm
    (MiniMax).

    Attributes:
        full, state, mlp: factors on the stream before full attention, a state or a feed-forward
            block is added.
    """

    full: float = 1.0
    state: float = 1.0
    mlp: float = 1.0


@dataclass(frozen=True)
class ExpertFacts:
    """Mixture of experts.

    Attributes:
        count, per_token: experts of a layer, and experts that a token uses.
        inner: inner width of one expert.
        dense_layers: layers with one dense feed-forward block instead.
        shared_inner: inner width of the shared experts; 0 = none.
        has_shared_gate: the shared experts' output is scaled by a sigmoid gate.
        scoring: how the router's logits become scores: "softmax" | "sigmoid" | "sparsemixer"
            (chooses and weighs differently, with `jitter`: `ops/experts_api.py`, route).
        is_normalised: the chosen scores are divided by their sum.
        scale: factor on the scores.
        groups, top_groups: expert groups, and how many of them a token may use.
        group_best: a group's score is the sum of this many of its best scores.
        has_correction: a bias per expert is added for the choice, not for the weight.
        has_bias: the router and every projection of the experts have a bias.
        scales_input: the score of an expert scales its input, not its output; needs one expert
            per token.
        is_gated: experts and shared experts have a gate projection.
        latent: width of the experts' input and output, between two projections that all experts
            share; 0 = the hidden size.
        limit, alpha: clamp of the gated unit (`ops/experts_api.py`, Clamp); 0 = no clamp.
        limits: clamp by layer, instead of `limit`; () = `limit` for all layers.
    """

    count: int
    per_token: int
    inner: int
    dense_layers: tuple[int, ...] = ()
    shared_inner: int = 0
    has_shared_gate: bool = False
    scoring: str = "softmax"
    is_normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    has_correction: bool = False
    has_bias: bool = False
    limit: float = 0.0
    limits: tuple[float, ...] = ()
    alpha: float = 0.0
    jitter: float = 0.0
    is_gated: bool = True
    latent: int = 0
    scales_input: bool = False

    def limit_of(self, layer: int) -> float:
        return self.limits[layer] if self.limits else self.limit


@dataclass(frozen=True)
class QuantFacts:
    """How a checkpoint is quantized.

    Attributes:
        method: quantization method ("fp8", "gptq" …).
        settings: its `quantization_config` as JSON text.
    """

    method: str
    settings: str


@dataclass(frozen=True)
class DraftModelFields:
    """What a trained draft model (EAGLE, EAGLE3, DFlash) adds to its ModelConfig.

    Attributes:
        num_tokens: size of the draft vocabulary.
        aux_layers: layers of the target whose inputs it reads, ascending; () = it reads its
            final hidden states.
        tokens: token ids of the draft vocabulary; () = the checkpoint holds them.
        block: tokens of a block, the newest one and masks; 0 = one token at a time.
        mask: token id of the mask.
    """

    num_tokens: int
    aux_layers: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    block: int = 0
    mask: int = 0


LAST = "last"
MEAN = "mean"
CLS = "cls"


@dataclass(frozen=True)
class DenseFacts:
    """A projection of pooled vectors, as sentence-transformers stores it.

    Attributes:
        path: its file of weights: `linear.weight`, and `linear.bias` if it has one.
        activation: "identity" | "tanh".
    """

    path: str
    inputs: int
    outputs: int
    has_bias: bool
    activation: str


@dataclass(frozen=True)
class Pooling:
    """How the hidden states of a prompt become one vector.

    Attributes:
        kind: "last" token | "mean" of all tokens | "cls", the first token.
        normalize: scale the vector to length one.
        dense: projections after the pooling, in order.
    """

    kind: str = LAST
    normalize: bool = True
    dense: tuple["DenseFacts", ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and sizes of a model.

    Attributes:
        path: local file (GGUF) or folder (safetensors) that holds the weights.
        format: "gguf" | "safetensors".
        architecture: Hugging Face class name ("LlamaForCausalLM"); GGUF names are mapped to it.
        outer: class of the multimodal checkpoint whose text model this is (`families/nested.py`);
            "" = the checkpoint is the text model alone.
        layer_kinds: FULL, WINDOW, STATE, BOTH or NONE per layer; () = FULL for all.
        dtype: dtype of the stored weights as text ("float32", "bfloat16", "q4_1" …).
    """

    path: str
    format: str
    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float = 1e-5
    hidden_act: str = "silu"
    rope: RopeFacts = field(default_factory=RopeFacts)
    window_rope: RopeFacts | None = None
    """RoPE of "window" layers where it differs from the others'."""
    rotary_dim: int = 0
    """Leading dimensions of a head that rotate; 0 = all."""
    tie_embeddings: bool = False
    attention_bias: bool = False
    """Bias on the q, k, v projections."""
    output_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    layer_kinds: tuple[str, ...] = ()
    window_heads: int = 0
    """Heads of "window" layers; 0 = as many as the others have."""
    window: int = 0
    """Tokens that a "window" layer sees, its own position included; of an encoder, to each side."""
    qk_norm: str = ""
    """As `Family.qk_norm`, if it differs between models of a family."""
    parallel: str | None = None
    """As `Family.parallel`, if it differs between models of a family."""
    post_norm: bool | None = None
    """As `Family.post_norm`, if it differs between models of a family."""
    unrotated: tuple[int, ...] = ()
    """Layers without rotation, whatever their kind."""
    positions: str = ""
    """A vector per position that is added to the embedding: "learned" | "sinusoidal" | "" (none).
    The first position has row `first_position` of the table."""
    alibi: float = 0.0
    """Factor on the slopes by which attention logits fall with distance (ALiBi, arXiv 2108.12409);
    0 = none."""
    qkv_limit: float = 0.0
    """q, k and v are clamped to ±limit after their projection; 0 = no clamp."""
    attention_scale: float = 0.0
    """Factor on q·k; 0 = 1/sqrt(head_dim)."""
    attention_cap: float = 0.0
    """Attention logits become cap·tanh(logits/cap); 0 = off."""
    attention_factor: float = 1.0
    """Factor on the attention output before it joins the residual stream."""
    gate_factor: float = 1.0
    up_factor: float = 1.0
    """Factors on the two projections of a feed-forward block."""
    has_head_gates: bool = False
    """Each head's output is scaled by a sigmoid gate, computed from the block's input."""
    has_wide_gates: bool = False
    """The same with a gate for each dimension of a head."""
    query_rank: int = 0
    """Rank of the query projection, with a norm in between; 0 = one full projection. For latent
    attention see `LatentFacts.query_rank`."""
    attention_sinks: bool = False
    """Each head has a learned extra logit in the softmax, without a value."""
    mlp_limits: tuple[float, ...] = ()
    """By layer: clamp of gate and up in a dense feed-forward block or in the shared experts
    (`ops/api.py`, silu_and_mul); 0 = no clamp."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor on each block's output before it joins the residual stream."""
    normed_stream: NormedStream | None = None
    """None = the usual residual stream, before the norm."""
    shared: SharedFacts | None = None
    """None = no layers share weights."""
    has_normed_head: bool = False
    """The columns of the LM head are scaled to length one."""
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    """Final logits become cap·tanh(logits/cap); 0 = off."""
    latent: LatentFacts | None = None
    """None = keys and values per head."""
    state: StateFacts | None = None
    """None = no "state" layers."""
    experts: ExpertFacts | None = None
    quant: QuantFacts | None = None
    """None = not quantized, or a GGUF file, whose tensors name their types."""
    dtype: str = "float32"
    outer: str = ""
    media: MediaConfig | None = None
    """None = prompts are text only."""
    context_limit: str = ""
    """Why `context_length` is less than the checkpoint's; "" = it is the checkpoint's."""
    draft_fields: DraftModelFields | None = None
    num_mtp_layers: int = 0
    """MTP layers of the checkpoint, after the last layer of the model; not in `num_layers`."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    pooling: Pooling | None = None
    """None = the model is served for text generation."""
    labels: tuple[str, ...] = ()
    """Classes of a sequence classifier; its output vector holds their scores."""
    is_encoder: bool = False
    """Every token sees the whole prompt; nothing is generated."""
    num_segments: int = 0
    """Token types of an encoder's input."""
    separator_id: int = -1
    """Token after which the second segment begins; -1 = there is one segment."""
    first_position: int = 0
    """Position embedding of a prompt's first token."""

    @property
    def stores_floats(self) -> bool:
        """Whether the stored weights are floats, not GGUF's quantized blocks."""
        return self.dtype in ("float32", "bfloat16", "float16", "f32", "f16", "bf16")

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether a prompt must run in one row, without chunks or prefix cache."""
        return self.is_encoder or (self.pooling is not None and self.pooling.kind != LAST)

    @property
    def kept_per_token(self) -> int:
        """Numbers that one layer's KV cache keeps per token."""
        if self.latent is not None:
            return self.latent.rank + self.latent.rope_dim + self.latent.index_dim
        return 2 * self.num_kv_heads * stored_head_dim(self)

    def inner_of(self, layer: int) -> int:
        """Inner width of the feed-forward blocks that one token uses in this layer."""
        experts = self.experts
        if experts is None or layer in experts.dense_layers:
            return self.intermediate_size
        return experts.per_token * experts.inner + experts.shared_inner

    def kind_of(self, layer: int) -> str:
        return self.layer_kinds[layer] if self.layer_kinds else FULL

    def kept_by(self, layer: int) -> tuple[str, ...]:
        """The kinds of cache that a layer has: FULL, WINDOW, STATE."""
        kind = self.kind_of(layer)
        return {BOTH: (FULL, STATE), NONE: ()}.get(kind, (kind,))

    @property
    def hybrid_layers(self) -> tuple[int, ...]:
        """Layers with both attention and a state, which may share blocks."""
        return tuple(at for at, kind in enumerate(self.layer_kinds) if kind == BOTH)

    @property
    def has_states(self) -> bool:
        return STATE in self.layer_kinds or BOTH in self.layer_kinds

    def heads_of(self, layer: int) -> int:
        is_window = self.kind_of(layer) == WINDOW
        return self.window_heads if is_window and self.window_heads else self.num_heads

    def mlp_limit_of(self, layer: int) -> float:
        """The clamp of the layer's feed-forward block; math.inf = no clamp."""
        return (self.mlp_limits[layer] if self.mlp_limits else 0.0) or math.inf

    def rotary_dim_of(self, layer: int) -> int:
        return self.rope_of(layer).dim or self.rotary_dim

    def rope_of(self, layer: int) -> RopeFacts:
        if layer in self.unrotated:
            return RopeFacts(kind="none")
        is_window = self.kind_of(layer) == WINDOW
        return self.window_rope if is_window and self.window_rope is not None else self.rope


def stored_head_dim(model_config: ModelConfig) -> int:
    """Head size of the cache; ALiBi adds the position to every key (`layers/attention.py`)."""
    return model_config.head_dim + (ALIBI_DIMS if model_config.alibi else 0)
