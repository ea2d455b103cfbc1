"""What a model family says about itself, in one object: how its configurations are read, how its
weights are called, and how its blocks are put together. Knows no tensors.

The sizes are in the model card; a family says only where it departs from Llama.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace

from banyan.base.json_types import is_list
from banyan.families.names import NameMap
from banyan.model_config.facts import Facts
from banyan.model_config.model_config import FULL, STATE, WINDOW, ModelConfig

MAX_WIDTH = 1 << 20
MAX_LENGTH = 1 << 26
GELU_TANH = "gelu_pytorch_tanh"


def state_where(
    facts: Facts,
    num_layers: int,
    names: Mapping[str, str],
    default: Callable[[int], str],
    key: str = "layer_types",
) -> tuple[str, ...]:
    """Kinds of a model some of whose layers keep a state.

    Args:
        names: what the list of layers calls each kind.
        default: kind of a layer where nothing is listed.
        key: of that list.
    """
    listed = facts.listed(key)
    kinds = tuple(default(layer) for layer in range(num_layers))
    if listed:
        kinds = tuple(names.get(str(name), "") for name in listed)
        if len(kinds) != num_layers or "" in kinds:
            raise facts.error(key, listed, f"{num_layers} of {', '.join(names)}")
    return kinds


_LAYER_KINDS = {"full_attention": FULL, "sliding_attention": WINDOW}

Kinds = tuple[tuple[str, ...], int]
"""Kind of each layer and the window in tokens; ((), 0) when every layer sees everything."""
More = Callable[[Facts, ModelConfig], ModelConfig]


@dataclass(frozen=True)
class Biases:
    """Which projections have a bias."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


def llama_biases(facts: Facts) -> Biases:
    has_bias = facts.flag("attention_bias", default=False)
    return Biases(has_bias, has_bias, facts.flag("mlp_bias", default=False))


def window_everywhere(facts: Facts, num_layers: int) -> Kinds:
    """A window that is named holds for every layer, unless `layer_types` says otherwise."""
    if not facts.has("sliding_window"):
        return (), 0
    return window_where(facts, num_layers, lambda layer: True)


def full_at_every(facts: Facts, num_layers: int, period: int) -> Kinds:
    """Every `period`-th layer sees everything."""
    period = facts.integer("sliding_window_pattern", 1, MAX_LENGTH, default=period)
    return window_where(facts, num_layers, lambda layer: (layer + 1) % period > 0)


def window_where(facts: Facts, num_layers: int, has_window: Callable[[int], bool]) -> Kinds:
    """`layer_types` decides where it is given."""
    window = facts.integer("sliding_window", 1, MAX_LENGTH, default=4096)
    listed = facts.listed("layer_types")
    if not listed:
        kinds = tuple(WINDOW if has_window(layer) else FULL for layer in range(num_layers))
    else:
        kinds = tuple(_LAYER_KINDS.get(str(name), "") for name in listed)
        if len(kinds) != num_layers or "" in kinds:
            raise facts.error("layer_types", listed, f"{num_layers} of {', '.join(_LAYER_KINDS)}")
    return (kinds, window) if WINDOW in kinds else ((), 0)


def no_more(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    return model_config


def nothing_of_tensors(names: Container[str], model_config: ModelConfig) -> ModelConfig:
    return model_config


def kinds_by_heads(facts: Facts, num_layers: int) -> Kinds:
    """Of a GGUF file: layers with heads of keys attend, the others keep states."""
    listed = facts.any("attention.head_count_kv")
    if not is_list(listed) or len(listed) != num_layers:
        raise facts.error("attention.head_count_kv", listed, f"a number for each of {num_layers}")
    return tuple(FULL if count else STATE for count in listed), 0


def as_it_is(facts: Facts) -> Mapping[str, object]:
    return {}


def not_told(facts: Facts) -> int | None:
    return None


def without_logits(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    """The head, if there is one, scores classes: it is no copy of the embedding."""
    return replace(model_config, tie_embeddings=False)


@dataclass(frozen=True)
class HubForm:
    """How a family's config.json departs from Llama's.

    Attributes:
        eps_key, eps: key of the norms' eps and its default.
        heads_key: key of the number of attention heads.
        heads: default of that number; 0 = it must be given.
        context: default of the longest context.
        inner_keys: keys of the inner width of feed-forward blocks; the first that is there counts;
            () where a block has none.
        is_nested: the facts lie in a part of config.json, "text_config", beside those of what sees.
        num_layers: how many layers there are, where num_hidden_layers does not say it.
        activation_key, activation: key of the activation, and the one this family is built with.
        head_dim: default; 0 = hidden size / heads.
        rope_theta: default.
        rotary: default share of a head that rotates.
        window_theta: default base of window layers when they have a RoPE of their own; 0 = no.
        rope_kinds: other names of RoPE kinds.
        respelled: keys in the usual words for what the configuration says in words of its own; they
            take the place of what it has under these keys.
        more: fills in what only this family has.
    """

    eps_key: str = "rms_norm_eps"
    eps: float = 1e-6
    heads_key: str = "num_attention_heads"
    heads: int = 0
    context: int = 2048
    inner_keys: tuple[str, ...] = ("intermediate_size",)
    activation_key: str = "hidden_act"
    activation: str = "silu"
    tied: bool = False
    head_dim: int = 0
    rope_theta: float = 10000.0
    rotary: float = 1.0
    window_theta: float = 0.0
    rope_kinds: Mapping[str, str] = field(default_factory=dict)
    respelled: Callable[[Facts], Mapping[str, object]] = as_it_is
    biases: Callable[[Facts], Biases] = llama_biases
    kinds: Callable[[Facts, int], Kinds] = window_everywhere
    is_nested: bool = False
    num_layers: Callable[[Facts], int | None] = not_told
    more: More = no_more


@dataclass(frozen=True)
class GgufForm:
    """How a family's GGUF metadata departs from Llama's.

    Attributes:
        architecture: class name the same model has in Hugging Face's form.
        eps_key: key of the norms' eps.
        window_period: with a window, every n-th layer sees everything; 0 = none does.
        may_norm_heads: each head of q and k is normed where the file brings the norms.
        kinds: of models with states; such files may count heads and widths layer by layer, 0 where
            a layer has none.
        of_tensors: fills in what only the names of a file's tensors tell.
        respelled: as `HubForm.respelled`.
        has_divisors: what slows frequencies ("rope_freqs.weight") follows no rule that is known.
        more: fills in what only this family has.
    """

    architecture: str
    activation: str = "silu"
    eps_key: str = "attention.layer_norm_rms_epsilon"
    window_period: int = 0
    may_norm_heads: bool = False
    respelled: Callable[[Facts], Mapping[str, object]] = as_it_is
    has_divisors: bool = False
    kinds: Callable[[Facts, int], Kinds] | None = None
    more: More = no_more
    of_tensors: Callable[[Container[str], ModelConfig], ModelConfig] = nothing_of_tensors


@dataclass(frozen=True)
class MTPForm:
    """A layer for drafting that checkpoints of a family bring (`models/mtp.py`).

    Attributes:
        names: checkpoint format -> beginning of its tensors' names, where {} stands for the number
            of layers, and names of its weights, whole ones as in `NameMap`.
        has_states_first: its projection reads the state, and the token behind it.
    """

    names: Mapping[str, tuple[str, NameMap]]
    has_states_first: bool = False


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        hub, gguf: how its configurations are read; None where it has no such form.
        names: checkpoint format ("safetensors", "gguf") -> names of its weights.
        norm: "rms" | "layer" | "layer+bias".
        pre_norm: attention and feed-forward read a normed residual stream.
        post_norm: what they give is normed before it joins the stream.
        parallel: both read the same norm of the stream and join it together.
        gated: the feed-forward block has a gate.
        has_single_parts: a layer mixes tokens or is a feed-forward block (NONE), never both.
        qk_norm: "" | "head" (each head of q and k by itself) | "turned head" (as "head", after it
            has rotated) | "width" (all heads together).
        has_attention_gate: what a head of attention gives is scaled by the sigmoid of a gate, which
            the query projection makes behind that head's query.
        mtp: the checkpoint's MTP layers; None = there are none, or they are not supported.
    """

    hub: HubForm = field(default_factory=HubForm)
    gguf: GgufForm | None = None
    names: Mapping[str, NameMap] = field(default_factory=dict)
    norm: str = "rms"
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    gated: bool = True
    has_single_parts: bool = False
    qk_norm: str = ""
    has_attention_gate: bool = False
    mtp: MTPForm | None = None
