"""Family: how a model family's configuration is read, how its weights are named, and how its layers
are built.

Sizes are in ModelConfig. A family states only the differences from Llama.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace

from banyan.base.json_types import is_list
from banyan.families.names import NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import FULL, STATE, WINDOW, ModelConfig

MAX_WIDTH = 1 << 20
MAX_LENGTH = 1 << 26
GELU_TANH = "gelu_pytorch_tanh"


def state_where(
    fields: CheckpointFields,
    num_layers: int,
    names: Mapping[str, str],
    default: Callable[[int], str],
    key: str = "layer_types",
) -> tuple[str, ...]:
    """Layer kinds of a model that has layers with states.

    Args:
        names: names of the kinds in the configuration's list.
        default: kind of a layer if there is no list.
        key: key of the list.
    """
    listed = fields.listed(key)
    kinds = tuple(default(layer) for layer in range(num_layers))
    if listed:
        kinds = tuple(names.get(str(name), "") for name in listed)
        if len(kinds) != num_layers or "" in kinds:
            raise fields.error(key, listed, f"{num_layers} of {', '.join(names)}")
    return kinds


_LAYER_KINDS = {"full_attention": FULL, "sliding_attention": WINDOW}

Kinds = tuple[tuple[str, ...], int]
"""Kind of each layer and the window in tokens; ((), 0) = full attention in every layer."""
More = Callable[[CheckpointFields, ModelConfig], ModelConfig]


@dataclass(frozen=True)
class Biases:
    """Which projections have a bias."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


def llama_biases(fields: CheckpointFields) -> Biases:
    has_bias = fields.flag("attention_bias", default=False)
    return Biases(has_bias, has_bias, fields.flag("mlp_bias", default=False))


def window_everywhere(fields: CheckpointFields, num_layers: int) -> Kinds:
    """If a window is given it applies to every layer, unless `layer_types` is given."""
    if not fields.has("sliding_window"):
        return (), 0
    return window_where(fields, num_layers, lambda layer: True)


def full_at_every(fields: CheckpointFields, num_layers: int, period: int) -> Kinds:
    """Every `period`-th layer has full attention."""
    period = fields.integer("sliding_window_pattern", 1, MAX_LENGTH, default=period)
    return window_where(fields, num_layers, lambda layer: (layer + 1) % period > 0)


def window_listed(fields: CheckpointFields, num_layers: int) -> Kinds:
    """Windows in the layers that `layer_types` names alone."""
    return window_where(fields, num_layers, lambda layer: False)


def window_where(
    fields: CheckpointFields, num_layers: int, has_window: Callable[[int], bool]
) -> Kinds:
    """`layer_types` takes precedence over `has_window`."""
    window = fields.integer("sliding_window", 1, MAX_LENGTH, default=4096)
    listed = fields.listed("layer_types")
    if not listed:
        kinds = tuple(WINDOW if has_window(layer) else FULL for layer in range(num_layers))
    else:
        kinds = tuple(_LAYER_KINDS.get(str(name), "") for name in listed)
        if len(kinds) != num_layers or "" in kinds:
            raise fields.error("layer_types", listed, f"{num_layers} of {', '.join(_LAYER_KINDS)}")
    return (kinds, window) if WINDOW in kinds else ((), 0)


def no_more(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return model_config


def nothing_of_tensors(names: Container[str], model_config: ModelConfig) -> ModelConfig:
    return model_config


def limited(model_config: ModelConfig, length: int, why: str) -> ModelConfig:
    """A model whose longest requests are not supported.

    Args:
        why: what longer requests would need, for messages.
    """
    if model_config.context_length <= length:
        return model_config
    return replace(model_config, context_length=length, context_limit=why)


def kinds_by_heads(fields: CheckpointFields, num_layers: int) -> Kinds:
    """From a GGUF file: layers with KV heads have attention, the others keep states."""
    listed = fields.any("attention.head_count_kv")
    if not is_list(listed) or len(listed) != num_layers:
        raise fields.error("attention.head_count_kv", listed, f"a number for each of {num_layers}")
    return tuple(FULL if count else STATE for count in listed), 0


def as_it_is(fields: CheckpointFields) -> Mapping[str, object]:
    return {}


def renamed(fields: CheckpointFields, keys: Mapping[str, str]) -> Mapping[str, object]:
    """The usual key -> the value of the family's own key, where that is present."""
    return {usual: fields.any(own) for own, usual in keys.items() if fields.has(own)}


def not_given(fields: CheckpointFields) -> int | None:
    return None


def without_logits(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """For embedding models and classifiers: the head is never tied to the embedding."""
    return replace(model_config, tie_embeddings=False)


@dataclass(frozen=True)
class HubForm:
    """How a family's config.json differs from Llama's.

    Attributes:
        eps_key, eps: key of the norms' eps and its default.
        heads_key: key of the number of attention heads.
        heads: default of that number; 0 = it must be given.
        context: default of the context length.
        inner_keys: keys of the feed-forward blocks' inner width, the first present one is used; ()
            = there are no feed-forward blocks.
        num_layers: reads the number of layers if num_hidden_layers is absent.
        activation_key, activation: key of the activation, and its default.
        activations: other supported activations.
        head_dim: default; 0 = hidden size / heads.
        rope_theta: default.
        rotary: default share of a head that is rotated.
        window_theta: default RoPE base of window layers; 0 = the same RoPE as full layers.
        rope_kinds: other names of RoPE kinds.
        respelled: translates the family's own keys into the usual ones; replaces their values.
        more: adds what only this family has.
    """

    eps_key: str = "rms_norm_eps"
    eps: float = 1e-6
    heads_key: str = "num_attention_heads"
    heads: int = 0
    context: int = 2048
    inner_keys: tuple[str, ...] = ("intermediate_size",)
    activation_key: str = "hidden_act"
    activation: str = "silu"
    activations: tuple[str, ...] = ()
    tied: bool = False
    head_dim: int = 0
    rope_theta: float = 10000.0
    rotary: float = 1.0
    window_theta: float = 0.0
    rope_kinds: Mapping[str, str] = field(default_factory=dict)
    respelled: Callable[[CheckpointFields], Mapping[str, object]] = as_it_is
    biases: Callable[[CheckpointFields], Biases] = llama_biases
    kinds: Callable[[CheckpointFields, int], Kinds] = window_everywhere
    num_layers: Callable[[CheckpointFields], int | None] = not_given
    more: More = no_more


@dataclass(frozen=True)
class GgufForm:
    """How a family's GGUF metadata differs from Llama's.

    Attributes:
        architecture: the model's class name in transformers.
        eps_key: key of the norms' eps.
        window_period: with a window, every n-th layer has full attention; 0 = none.
        may_norm_heads: q and k heads are normed if the file has the norms.
        kinds: layer kinds of models with states; such files may list heads and widths per layer, 0
            for a layer without.
        of_tensors: adds what only the names of the file's tensors show.
        respelled: as `HubForm.respelled`.
        has_divisors: "rope_freqs.weight" holds arbitrary divisors, not Llama 3's rule.
        more: adds what only this family has.
    """

    architecture: str
    activation: str = "silu"
    eps_key: str = "attention.layer_norm_rms_epsilon"
    window_period: int = 0
    may_norm_heads: bool = False
    respelled: Callable[[CheckpointFields], Mapping[str, object]] = as_it_is
    has_divisors: bool = False
    kinds: Callable[[CheckpointFields, int], Kinds] | None = None
    more: More = no_more
    of_tensors: Callable[[Container[str], ModelConfig], ModelConfig] = nothing_of_tensors


@dataclass(frozen=True)
class MTPForm:
    """The MTP (multi-token prediction) layer of a family's checkpoints (`models/mtp.py`).

    Attributes:
        names: checkpoint format -> (prefix of its tensors' names, with {} for the number of layers;
            names of its weights).
        has_states_first: its projection reads [hidden state, token embedding], in this order.
    """

    names: Mapping[str, tuple[str, NameMap]]
    has_states_first: bool = False


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        hub, gguf: how its configurations are read; gguf None = no GGUF files.
        names: checkpoint format ("safetensors", "gguf") -> names of its weights.
        norm: "rms" | "layer" | "layer+bias", or "bare rms" | "bare layer" without weights.
        embedding_norm: the embeddings are normed before the first layer.
        starts_normed: the first layer's norm is the embeddings', and its output is the stream.
        pre_norm: attention and feed-forward read a normed residual stream.
        post_norm: their outputs are normed before they join the stream.
        parallel: attention and feed-forward read the same stream and are added together:
            "" (no) | "one norm" | "two norms" (each has its own).
        gated: the feed-forward block has a gate.
        has_single_parts: a layer is a token mixer or a feed-forward block (NONE), never both.
        qk_norm: "" | "head" (per head of q and k) | "turned head" (per head, after RoPE) | "width"
            (all heads together) | "unit" (per head, after RoPE, without weights) | "layer" |
            "layer+bias" (LayerNorm per head) | "each head" (LayerNorm, each head its weights).
        has_attention_gate: each attention head's output is scaled by a sigmoid gate, which the
            query projection computes after that head's query.
        mtp: the MTP layer; None = checkpoints have none, or it is not supported.
    """

    hub: HubForm = field(default_factory=HubForm)
    gguf: GgufForm | None = None
    names: Mapping[str, NameMap] = field(default_factory=dict)
    norm: str = "rms"
    embedding_norm: bool = False
    starts_normed: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    parallel: str = ""
    gated: bool = True
    has_single_parts: bool = False
    qk_norm: str = ""
    has_attention_gate: bool = False
    mtp: MTPForm | None = None
