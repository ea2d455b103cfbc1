"""ModelConfig: plain facts of a checkpoint, the same whether it came as GGUF or safetensors.

Knows no tensors and no devices. `model_config/checkpoint.py` reads cards from files.
"""

import math
from dataclasses import dataclass, field

FULL = "full"
"""A layer reads every position of the request."""
WINDOW = "window"
"""A layer reads the last `window` positions only; pages below return while the request runs."""
STATE = "state"
"""A layer keeps one running state of the whole prefix; copies of it mark where to resume."""
BOTH = "full and state"
"""Full attention and a state side by side, which read the same and whose results are added."""
NONE = "none"
"""A layer mixes no tokens and keeps nothing."""


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
    """longrope: what each frequency is divided by within the original length …"""
    long_factor: tuple[float, ...] = ()
    """… and when requests may be longer."""
    dim: int = 0
    """Leading dimensions of a head that rotate; 0 = the card's."""
    short_mscale: float = 0.0
    """longrope: factor on cos and sin with either set, where both are given."""
    long_mscale: float = 0.0


@dataclass(frozen=True)
class LatentFacts:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads
    come from one latent vector per token, which is what the cache keeps.

    Attributes:
        query_rank: width that queries are squeezed through; 0 = one plain projection.
        rank: width of the latent vector.
        plain_dim, rope_dim: parts of a query and key head without and with rotation.
        value_dim: width of a value head.
        index_heads, index_dim: heads of the indexer that chooses what a token reads, and their
            width, of which rope_dim rotate; 0 = every token reads all before it.
        index_top: positions that it chooses.
        norm_eps: eps of the norms of latents and squeezed queries; 0 = the model's.
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
    """How "state" layers mix tokens.

    Attributes:
        mixer: "conv" (gated short convolution, LFM2) | "scan" (Mamba-2) | "delta" (gated delta
            net) | "delta by key" (that with a decay for each key dimension, Kimi) |
            "selective" (Mamba, whose channels are heads) | "lightning" (linear attention whose
            heads forget at fixed rates, MiniMax).
        taps: inputs that a position of the convolution sees, its own included; 0 = there is none.
        has_conv_bias, has_bias: of the convolution; of the projections around it.
        heads, key_heads: value heads, and those that they share keys and queries of.
        key_dim, value_dim: of a head: its state is [key_dim, value_dim].
        least_step, most_step: bounds of what a state moves on with one token.
        is_grouped: projections of a delta net hold all that belongs to a key head together.
        has_grouped_rates: so do those of its rates.
        is_tiled: value heads of its last projections lie in turns, one of each key head after
            another (GGUF files of Qwen3.5).
        step_rank: of a "selective" one, width that steps are squeezed through.
        has_part_norms: its steps, keys and queries are normed.
        norm: of what a scan's heads give: "gated" (behind their gate) | "plain" (before it) | "".
        norm_eps: of that norm; 0 = the model's.
        factors: on what the projection of a scan makes: gate, values, keys, queries, steps.
        factor: on what the layer gives.
        depth: layers of the model, among which a "lightning" one forgets more slowly further down.
    """

    mixer: str
    taps: int
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
        """What ranks share of a layer: channels, or the heads that have keys of their own."""
        if self.mixer == "conv":
            return hidden_size
        return self.key_heads if self.mixer == "delta" else self.heads


@dataclass(frozen=True)
class SharedFacts:
    """Blocks of attention and feed-forward that "full and state" layers take in turns, each before
    its state (Zamba2).

    Attributes:
        blocks: how many there are for the whole model.
        rank: width that projections of a layer's own beside the block's are squeezed through.
        has_attention_adapters: queries, keys and values have such projections too.
    """

    blocks: int
    rank: int
    has_attention_adapters: bool = False


@dataclass(frozen=True)
class NormedStream:
    """What a block's norm gives is the stream that the block joins (MiniMax).

    Attributes:
        full, state, mlp: factors on that stream where attention, a state or a feed-forward block
            joins it.
    """

    full: float = 1.0
    state: float = 1.0
    mlp: float = 1.0


@dataclass(frozen=True)
class ExpertFacts:
    """Feed-forward blocks of which each token uses a few.

    Attributes:
        count, per_token: experts of a layer, and how many a token goes through.
        inner: inner width of one expert.
        dense_layers: layers that have one plain feed-forward block instead.
        shared_inner: inner width of the block that every token goes through; 0 = none.
        has_shared_gate: that block's output is scaled by a sigmoid of the token.
        scoring: "softmax" | "sigmoid", what makes scores of the router's logits; "sparsemixer"
            chooses and weighs in a way of its own (`ops/experts_api.py`, route), with `jitter`.
        is_normalised: the chosen scores are divided by their sum.
        scale: factor on the scores.
        groups, top_groups: experts lie in groups of which a token may use the best few.
        group_best: a group is as good as the sum of this many of its best scores.
        has_correction: a bias per expert counts for the choice and not for the weight.
        has_bias: the router and every projection of the experts have one.
        is_gated: each expert, and the block beside them, has a gate.
        latent: width that experts read and give, between two projections that all share; 0 = the
            stream's.
        limit, alpha: the gated unit is clamped (`ops/experts_api.py`, Clamp); 0 = it is not.
        limits: by layer, in the place of `limit`; () = that holds for all.
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

    def limit_of(self, layer: int) -> float:
        return self.limits[layer] if self.limits else self.limit


@dataclass(frozen=True)
class QuantFacts:
    """How a checkpoint was quantised.

    Attributes:
        method: the name that the checkpoint gives ("fp8", "gptq" …).
        settings: its `quantization_config`, as JSON text; the method reads it.
    """

    method: str
    settings: str


@dataclass(frozen=True)
class DraftModelFields:
    """Of a model that was trained to draft for another one.

    Attributes:
        num_tokens: of the other model's vocabulary, those that it knows.
        aux_layers: layers of the target model whose inputs it reads, in order; () = it reads the
            last hidden states.
        tokens: ids of what it knows, where the checkpoint does not say so.
        block: tokens that it reads at once, the newest one and masks; 0 = it reads one by one.
        mask: id of a mask.
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
class Pooling:
    """How the hidden states of a prompt become one vector.

    Attributes:
        kind: the "last" token's | the "mean" of all | the first token's ("cls").
        normalize: scale the vector to length one.
    """

    kind: str = LAST
    normalize: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """What every room may know about the model.

    Attributes:
        path: local file (GGUF) or folder (safetensors) that holds the weights.
        format: "gguf" | "safetensors".
        architecture: Hugging Face class name ("LlamaForCausalLM"); GGUF names are mapped to it.
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
    """Tokens that a "window" layer sees, its own position included."""
    qk_norm: str = ""
    """As `Family.qk_norm`, where it differs between models of a family."""
    attention_scale: float = 0.0
    """Factor on q·k; 0 = 1/sqrt(head_dim)."""
    attention_cap: float = 0.0
    """Attention logits become cap·tanh(logits/cap); 0 = off."""
    attention_factor: float = 1.0
    """Factor on what attention adds to the residual stream."""
    gate_factor: float = 1.0
    up_factor: float = 1.0
    """Factors on the two projections of a feed-forward block."""
    has_head_gates: bool = False
    """What a head gives is scaled by the sigmoid of one number that the block's input makes."""
    query_rank: int = 0
    """Width that queries are squeezed through, and normed, before a matrix makes those of all heads
    of it; 0 = one plain projection. Latent attention has its own."""
    attention_sinks: bool = False
    """Each head has a learned logit in the softmax that has no value."""
    mlp_limits: tuple[float, ...] = ()
    """By layer: most that the gate of a plain feed-forward block is, or of the one beside experts,
    and its up to either side (`ops/api.py`, silu_and_mul); 0 = no bound."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor on what each block adds to the residual stream."""
    normed_stream: NormedStream | None = None
    """None where blocks join the stream that their norms have read."""
    shared: SharedFacts | None = None
    """None where every layer has weights of its own."""
    has_normed_head: bool = False
    """Columns of the head, one per dimension of the stream, have length one."""
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    """Final logits become cap·tanh(logits/cap); 0 = off."""
    latent: LatentFacts | None = None
    """Latent attention in the place of keys and values per head."""
    state: StateFacts | None = None
    """Of the "state" layers."""
    experts: ExpertFacts | None = None
    quant: QuantFacts | None = None
    """None when the weights are plain, or in blocks that say so themselves (GGUF)."""
    dtype: str = "float32"
    eagle: DraftModelFields | None = None
    num_mtp_layers: int = 0
    """Layers behind the last one that the checkpoint brings for drafting; what is answered is not
    theirs."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    pooling: Pooling | None = None
    """How a prompt becomes a vector; None when the model is served for text."""
    labels: tuple[str, ...] = ()
    """Classes that the model's head scores; the vector holds their scores then."""
    is_encoder: bool = False
    """Every token sees the whole prompt; nothing is generated."""
    num_segments: int = 0
    """Kinds of text that an encoder tells apart."""
    separator_id: int = -1
    """Token behind which the second segment begins; -1 = there is one segment."""
    first_position: int = 0
    """Position embedding of a prompt's first token."""

    @property
    def stores_floats(self) -> bool:
        """The weights' type is one of floats, and not of blocks as GGUF has them."""
        return self.dtype in ("float32", "bfloat16", "float16", "f32", "f16", "bf16")

    @property
    def needs_whole_prompts(self) -> bool:
        """A prompt must go through the model in one row, and nothing of it may be cached."""
        return self.is_encoder or (self.pooling is not None and self.pooling.kind != LAST)

    @property
    def kept_per_token(self) -> int:
        """Numbers that the cache of one layer keeps of each token."""
        if self.latent is not None:
            return self.latent.rank + self.latent.rope_dim + self.latent.index_dim
        return 2 * self.num_kv_heads * self.head_dim

    def inner_of(self, layer: int) -> int:
        """Inner width of the feed-forward blocks that a token goes through in this layer."""
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
    def takers(self) -> tuple[int, ...]:
        """Layers that have both attention and a state, which may share blocks."""
        return tuple(at for at, kind in enumerate(self.layer_kinds) if kind == BOTH)

    @property
    def has_states(self) -> bool:
        return STATE in self.layer_kinds or BOTH in self.layer_kinds

    def heads_of(self, layer: int) -> int:
        is_window = self.kind_of(layer) == WINDOW
        return self.window_heads if is_window and self.window_heads else self.num_heads

    def mlp_limit_of(self, layer: int) -> float:
        """math.inf where there is none."""
        return (self.mlp_limits[layer] if self.mlp_limits else 0.0) or math.inf

    def rotary_dim_of(self, layer: int) -> int:
        return self.rope_of(layer).dim or self.rotary_dim

    def rope_of(self, layer: int) -> RopeFacts:
        is_window = self.kind_of(layer) == WINDOW
        return self.window_rope if is_window and self.window_rope is not None else self.rope
