"""ModelConfig of a folder in Hugging Face's form: config.json, generation_config.json.

Source: the configuration classes' documented keys; `rope_parameters` is the later spelling of
`rope_scaling` plus `rope_theta`. Pooling and classification heads: modules.json and
1_Pooling/config.json as sentence-transformers documents them; id2label.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches

from banyan.base.errors import ConfigError, ModelError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import printable
from banyan.base.os import open_regular
from banyan.families import FAMILIES, known_classes
from banyan.families.base import GELU_TANH, MAX_LENGTH, MAX_WIDTH, HubForm, window_everywhere
from banyan.families.nested import NESTED, TEXT_MODELS, NestedForm
from banyan.formats.shards import tensor_names
from banyan.model_config.checkpoint_fields import CheckpointFields, read_json
from banyan.model_config.media import MediaConfig
from banyan.model_config.media_from_hf import read_media
from banyan.model_config.model_config import (
    CLS,
    LAST,
    MEAN,
    DenseFacts,
    ModelConfig,
    Pooling,
    QuantFacts,
    RopeFacts,
)
from banyan.model_config.quantization import form_of
from banyan.model_config.sound_from_hf import read_sound

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_VOCAB = 1 << 22

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_MAX_PAIRS = 4096
_SPELLINGS = {"gelu_new": GELU_TANH, "gelu_fast": GELU_TANH, "swish": "silu"}
"""Other names of activations."""
_AXES = "mrope"
"""Rotation by three axes, which are equal for text."""
_TIED, _HEAD = "tie_word_embeddings", "lm_head.weight"
_MODELSLIM = "quant_model_description.json"
_MODELOPT = "hf_quant_config.json"
_MAX_DESCRIPTION = 64 << 20


def read_hub_folder(
    path: str,
    overrides: Mapping[str, object] | None = None,
    is_foreign: bool = False,
    with_media: bool = True,
    config_file: str = "",
) -> ModelConfig:
    """The ModelConfig of the folder at `path`.

    Args:
        overrides: values that replace config.json's.
        is_foreign: the transformers library runs the model: accept any architecture and read only
            the sizes that requests and the KV cache need.
        with_media: read how a multimodal checkpoint takes pictures; False = serve its text model.
        config_file: read instead of the folder's config.json.

    Raises:
        ModelError: names the key that is wrong.
        ConfigError: an override that nothing reads.
    """
    overrides, asked = overrides or {}, set[str]()
    where = config_file or os.path.join(path, "config.json")
    raw = read_json(where, is_needed=True)
    fields = CheckpointFields({**raw, **overrides}, where, asked=asked)
    if is_foreign:
        return _foreign_model_config(fields, path)
    architecture, outer, whole = _architecture(fields, path), "", fields
    if architecture in NESTED:
        outer, (architecture, values) = architecture, _text_model(raw, fields, path, architecture)
        fields = CheckpointFields({**values, **overrides}, fields.where, asked=asked)
    family = FAMILIES.load(architecture).hub
    if outer:
        family = replace(family, rope_kinds={**family.rope_kinds, _AXES: "default"})
    fields = fields.with_values(family.respelled(fields))
    model_config = family.more(fields, _model_config(fields, path, architecture, family))
    model_config = replace(model_config, quant=_quant(fields, path), outer=outer)
    if outer and with_media:
        media = read_media(outer, whole, fields, path, model_config.hidden_size)
        if (sound := read_sound(outer, whole, model_config.hidden_size, path)) is not None:
            media = replace(media or MediaConfig(), sound=sound)
        model_config = replace(model_config, media=media)
    if is_classifier(architecture):
        model_config = replace(model_config, labels=labels_of(fields))
        if model_config.num_segments > 1:
            model_config = replace(model_config, separator_id=separator_of(path))
    if model_config.is_encoder or model_config.labels or is_bare(architecture):
        model_config = replace(model_config, pooling=read_pooling(model_config))
    refuse_unread(overrides, asked)
    return model_config


def _foreign_model_config(fields: CheckpointFields, path: str) -> ModelConfig:
    """Sizes of a model that transformers runs, from the keys that most configurations share."""
    architecture = next(iter(fields.listed("architectures")), None)
    if not isinstance(architecture, str):
        raise fields.error("architectures", architecture, "a list that names the model's class")
    if fields.has("auto_map"):
        raise _own_code(path, architecture)
    num_heads, num_kv_heads, head_dim = _heads(fields, HubForm())
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    kinds, window = window_everywhere(fields, num_layers)
    return ModelConfig(
        path=path,
        format="safetensors",
        architecture=architecture,
        model_type=fields.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size", 1, MAX_WIDTH),
        intermediate_size=fields.integer("intermediate_size", 0, MAX_WIDTH, default=0),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=fields.integer("max_position_embeddings", 1, MAX_LENGTH),
        layer_kinds=kinds,
        window=window,
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        dtype=_dtype(fields),
        bos_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_ids=_eos_ids(fields, path, vocab_size),
        pad_id=_pad_id(fields, vocab_size),
    )


def refuse_unread(overrides: Mapping[str, object], asked: set[str]) -> None:
    """ConfigError if an override has a key that was not read."""
    unread = [key for key in overrides if key not in asked]
    if unread:
        near = get_close_matches(unread[0], sorted(asked), n=3)
        raise ConfigError(
            f"--json-model-override-args: nothing reads {printable(unread[0], 80)!r} of this model",
            hint=f"meant: {', '.join(near)}?" if near else "take it out",
        )


def _architecture(fields: CheckpointFields, path: str) -> str:
    listed = [name for name in fields.listed("architectures") if isinstance(name, str)]
    known = [name for name in listed if name in FAMILIES or name in NESTED]
    if known:
        return known[0]
    if fields.has("auto_map"):
        raise _own_code(path, str(listed[:1]))
    raise unknown_architecture(", ".join(listed) or "none named", path, known_classes())


def _text_model(
    raw: Mapping[str, object], fields: CheckpointFields, path: str, outer: str
) -> tuple[str, dict[str, object]]:
    """Class and fields of the text model of a multimodal checkpoint.

    The text model's own fields win, except for tied embeddings, which concern the whole.
    """
    nested = NESTED[outer]
    part = raw.get(nested.key)
    text = part if is_object(part) else {}
    kind = TEXT_MODELS.get(str(text.get("model_type")))
    listed = text.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if is_list(listed) else []
    named = [name for name in names if name in FAMILIES]
    architecture = nested.text or next(iter(named), kind.architecture if kind else "")
    if not architecture:
        raise ModelError(
            f"{printable(path)!r} ({outer}) has a text model of the unknown type "
            f"{printable(str(text.get('model_type')), 80)}",
            hint=f"known: {', '.join(TEXT_MODELS)}",
        )
    own = {key: value for key, value in text.items() if value is not None or raw.get(key) is None}
    values = {**raw, **(kind.defaults if kind and text else {}), **own, **nested.values}
    tied = raw.get(_TIED, text.get(_TIED))
    values[_TIED] = _lacks_head(path, nested) if tied is None else tied
    return architecture, values


def _lacks_head(path: str, nested: NestedForm) -> bool | None:
    """Whether the head is tied, for configurations that do not say so; None without weights."""
    names = tensor_names(path)
    return None if not names else all(nested.text_name(name) != _HEAD for name in names)


def _own_code(path: str, name: str) -> ModelError:
    return ModelError(
        f"{printable(path)!r} brings its own code ({printable(name)}), and code of a model "
        "repository is never run",
        hint=f"known here: {', '.join(known_classes())}",
    )


def unknown_architecture(name: str, path: str, known: list[str]) -> ModelError:
    return ModelError(
        f"{printable(path)!r} has the unknown architecture {printable(name, 80)}",
        hint=f"known: {', '.join(known)}; others may run with --model-impl transformers",
    )


def _model_config(
    fields: CheckpointFields, path: str, architecture: str, family: HubForm
) -> ModelConfig:
    """The fields that all families have."""
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB)
    context_length = fields.integer(
        "max_position_embeddings", 1, MAX_LENGTH, default=family.context
    )
    default = family.num_layers(fields)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS, default=default)
    num_heads, num_kv_heads, head_dim = _heads(fields, family)
    biases = family.biases(fields)
    kinds, window = family.kinds(fields, num_layers)
    rope, window_rope = _ropes(fields, family, context_length)
    rotary_dim = _rotary_dim(fields, family, head_dim, "full_attention")
    window_dim = _rotary_dim(fields, family, head_dim, "sliding_attention")
    if window_rope is not None and window_dim != rotary_dim:
        window_rope = replace(window_rope, dim=window_dim or head_dim)
    return ModelConfig(
        path=path,
        format="safetensors",
        architecture=architecture,
        model_type=fields.text("model_type", default="llama"),
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size", 1, MAX_WIDTH),
        intermediate_size=_inner(fields, family),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=context_length,
        norm_eps=fields.number(family.eps_key, 0.0, 1.0, default=family.eps),
        hidden_act=_activation(fields, family),
        rope=rope,
        window_rope=window_rope if kinds else None,
        rotary_dim=rotary_dim,
        tie_embeddings=fields.flag("tie_word_embeddings", default=family.tied),
        attention_bias=biases.qkv,
        output_bias=biases.output,
        mlp_bias=biases.mlp,
        layer_kinds=kinds,
        window=window,
        dtype=_dtype(fields),
        bos_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_ids=_eos_ids(fields, path, vocab_size),
        pad_id=_pad_id(fields, vocab_size),
    )


def _inner(fields: CheckpointFields, family: HubForm) -> int:
    keys = family.inner_keys
    if not keys:
        return 0
    return fields.integer(next((k for k in keys if fields.has(k)), keys[-1]), 1, MAX_WIDTH)


def _heads(fields: CheckpointFields, family: HubForm) -> tuple[int, int, int]:
    """Heads, kv heads and head size."""
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = fields.integer(family.heads_key, 1, MAX_HEADS, default=family.heads or None)
    num_kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} heads")
    if not fields.has("head_dim") and not family.head_dim and hidden_size % num_heads:
        raise fields.error("hidden_size", hidden_size, f"a multiple of {num_heads} heads")
    default = family.head_dim or hidden_size // num_heads
    head_dim = fields.integer("head_dim", 1, MAX_WIDTH, default=default)
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "even, so that rotary embedding can pair it")
    return num_heads, num_kv_heads, head_dim


def _rotary_dim(fields: CheckpointFields, family: HubForm, head_dim: int, kind: str) -> int:
    """Rotated leading dimensions in layers of a kind; 0 = all."""
    own = fields.part("rope_parameters")
    own = own.part(kind) if own is not None and own.has(kind) else own
    where = own if own is not None and own.has("partial_rotary_factor") else fields
    share = where.number("partial_rotary_factor", 0.0, 1.0, default=family.rotary)
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not rotary_dim:
        raise where.error("partial_rotary_factor", share, f"an even part of {head_dim} dimensions")
    return rotary_dim if rotary_dim != head_dim else 0


def _activation(fields: CheckpointFields, family: HubForm) -> str:
    name = fields.text(family.activation_key, default=family.activation)
    known = (family.activation, *family.activations)
    if (spelled := _SPELLINGS.get(name, name)) not in known:
        rule = f"{' or '.join(known)}, which this family is built with"
        raise fields.error(family.activation_key, name, rule)
    return spelled


def _dtype(fields: CheckpointFields) -> str:
    name = fields.text("dtype" if fields.has("dtype") else "torch_dtype", default="float32")
    if name not in ("float32", "float16", "bfloat16"):
        raise fields.error("dtype", name, "float32, float16 or bfloat16")
    return name


def _ropes(
    fields: CheckpointFields, family: HubForm, context_length: int
) -> tuple[RopeFacts, RopeFacts | None]:
    """RoPE of full layers, and of window layers if theirs differs."""
    own = fields.part("rope_parameters")
    nested = own is not None and (own.has("full_attention") or own.has("sliding_attention"))
    if own is not None and nested:
        full, window = own.part("full_attention"), own.part("sliding_attention")
        local = family.window_theta or family.rope_theta
        return (
            _rope(fields, full, family, family.rope_theta, context_length),
            _rope(fields, window, family, local, context_length),
        )
    theta = fields.number("rope_theta", 1.0, 1e12, default=family.rope_theta)
    rope = _rope(fields, own or fields.part("rope_scaling"), family, theta, context_length)
    if not family.window_theta:
        return rope, None
    local = fields.number("rope_local_base_freq", 1.0, 1e12, default=family.window_theta)
    return rope, RopeFacts(theta=local)


def _rope(
    fields: CheckpointFields,
    own: CheckpointFields | None,
    family: HubForm,
    theta: float,
    context_length: int,
) -> RopeFacts:
    """
    Args:
        own: the part of the configuration that describes this RoPE; None = there is none.
    """
    if own is None:
        return RopeFacts(theta=theta)
    kind = own.text("rope_type" if own.has("rope_type") else "type", default="default")
    kind = family.rope_kinds.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise own.error("rope_type", kind, f"one of: {', '.join(ROPE_KINDS)}")
    theta = own.number("rope_theta", 1.0, 1e12, default=theta)
    if kind == "default":
        return RopeFacts(theta=theta)
    attention = own.number("attention_factor", 0.0, 1e3) if own.has("attention_factor") else None
    length_key = "original_max_position_embeddings"
    needs_length = kind in ("llama3", "longrope")
    return RopeFacts(
        theta=theta,
        kind=kind,
        factor=own.number("factor", 1.0, 1e4, default=1.0 if kind == "longrope" else None),
        original_length=(own if own.has(length_key) else fields).integer(
            length_key, 1, MAX_LENGTH, default=None if needs_length else context_length
        ),
        low_freq_factor=own.number("low_freq_factor", 1e-3, 1e3, default=1.0),
        high_freq_factor=own.number("high_freq_factor", 1e-3, 1e3, default=4.0),
        beta_fast=own.number("beta_fast", 1e-3, 1e4, default=32.0),
        beta_slow=own.number("beta_slow", 1e-3, 1e4, default=1.0),
        attention_factor=attention,
        mscale=own.number("mscale", 0.0, 1e3, default=0.0),
        mscale_all_dim=own.number("mscale_all_dim", 0.0, 1e3, default=0.0),
        truncate=own.flag("truncate", default=True),
        short_factor=_factors(own, "short_factor", kind),
        long_factor=_factors(own, "long_factor", kind),
        short_mscale=own.number("short_mscale", 0.0, 1e3, default=0.0),
        long_mscale=own.number("long_mscale", 0.0, 1e3, default=0.0),
    )


def _factors(own: CheckpointFields, key: str, kind: str) -> tuple[float, ...]:
    """The divisors of LongRoPE."""
    listed = own.listed(key) if kind == "longrope" else []
    numbers = [v for v in listed if isinstance(v, int | float) and not isinstance(v, bool)]
    good = all(1e-3 <= v <= 1e6 for v in numbers)
    if len(numbers) != len(listed) or len(listed) > _MAX_PAIRS or not good:
        raise own.error(key, listed, "numbers from 0.001 to 1,000,000")
    if kind == "longrope" and not listed:
        raise own.error(key, None, "a list of numbers")
    return tuple(float(v) for v in numbers)


def _eos_ids(fields: CheckpointFields, path: str, vocab_size: int) -> tuple[int, ...]:
    """Every end-of-sequence id: from config.json and generation_config.json."""
    file = os.path.join(path, "generation_config.json")
    generation = CheckpointFields(read_json(file, is_needed=False), file)
    ids = fields.token_ids("eos_token_id", vocab_size)
    return tuple(dict.fromkeys(ids + generation.token_ids("eos_token_id", vocab_size)))


def _quant(fields: CheckpointFields, path: str) -> QuantFacts | None:
    """Quantization from config.json, or from the separate file of ModelSlim or ModelOpt."""
    own = fields.part("quantization_config")
    if own is not None:
        settings = json.dumps(fields.any("quantization_config"), sort_keys=True)
        return QuantFacts(form_of(own.text("quant_method")), settings)
    described = read_json(os.path.join(path, _MODELSLIM), is_needed=False, limit=_MAX_DESCRIPTION)
    if described:
        schemes = {name: text for name, text in described.items() if name.endswith(".weight")}
        return QuantFacts("modelslim", json.dumps({"schemes": schemes}, sort_keys=True))
    exported = read_json(os.path.join(path, _MODELOPT), is_needed=False)
    if exported:
        return QuantFacts("modelopt", json.dumps(exported, sort_keys=True))
    return None


def _pad_id(fields: CheckpointFields, vocab_size: int) -> int | None:
    """Some checkpoints write -1 for no padding token."""
    if not fields.has("pad_token_id") or fields.integer("pad_token_id", -1, MAX_VOCAB) == -1:
        return None
    return next(iter(fields.token_ids("pad_token_id", vocab_size)), None)


MAX_LABELS = 1 << 16
MAX_IDS = 1 << 22
_MODES = {
    "pooling_mode_cls_token": CLS,
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_lasttoken": LAST,
}
DENSE_ACTIVATIONS = ("identity", "tanh")
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")


def is_classifier(architecture: str) -> bool:
    return architecture.endswith("ForSequenceClassification")


def is_bare(architecture: str) -> bool:
    """Whether the class has no head and returns hidden states."""
    return architecture.endswith("Model") and not architecture.endswith("LMHeadModel")


def labels_of(fields: CheckpointFields) -> tuple[str, ...]:
    """Names of the classes, in the order of the head's outputs."""
    named = fields.part("id2label")
    if named is None:
        count = fields.integer("num_labels", 1, MAX_LABELS, default=2)
        return tuple(f"LABEL_{i}" for i in range(count))
    asked = fields.any("id2label")
    count = len(asked) if is_object(asked) else 0
    if not 1 <= count <= MAX_LABELS:
        raise fields.error("id2label", count, f"1 to {MAX_LABELS:,} classes")
    return tuple(named.text(str(i)) for i in range(count))


def separator_of(path: str) -> int:
    """Id of BERT's [SEP], after which the second text of a pair begins; -1 = none."""
    file = os.path.join(path, "tokenizer.json")
    fields = CheckpointFields(read_json(file, is_needed=False), file)
    for entry in fields.listed("added_tokens"):
        if is_object(entry) and entry.get("content") == "[SEP]":
            return CheckpointFields(entry, file).integer("id", 0, MAX_IDS)
    return -1


def read_pooling(model_config: ModelConfig) -> Pooling:
    """The pooling of this model.

    Classifiers and models without modules.json use an encoder's first token or a decoder's last
    token. A classifier's scores are not normalized.

    Raises:
        ModelError: the folder names an unsupported pooling or module.
    """
    kind = CLS if model_config.is_encoder else LAST
    if model_config.labels:
        return Pooling(kind, normalize=False)
    modules = os.path.join(model_config.path, "modules.json")
    if not os.path.isfile(modules):
        return Pooling(kind)
    pooling = Pooling(kind, normalize=False)
    for name, folder in _modules(modules):
        if name not in _KNOWN:
            raise ModelError(
                f"{printable(modules)!r} asks for the module {printable(name, 80)}",
                hint=f"known: {', '.join(_KNOWN)}",
            )
        if name == "Pooling":
            pooling = replace(
                pooling, kind=_kind(os.path.join(model_config.path, folder, "config.json"))
            )
        if name == "Dense":
            dense = _dense(os.path.join(model_config.path, folder))
            pooling = replace(pooling, dense=(*pooling.dense, dense))
        if name == "Normalize":
            pooling = replace(pooling, normalize=True)
    return pooling


def _modules(path: str) -> list[tuple[str, str]]:
    """Class and folder of each module, in order."""
    try:
        with open_regular(path) as file:
            listed: object = json.loads(file.read(1 << 16))
    except (OSError, ValueError, RecursionError):
        listed = None
    parts = [CheckpointFields(e, path) for e in listed if is_object(e)] if is_list(listed) else []
    if not is_list(listed) or len(parts) != len(listed):
        raise ModelError(f"{printable(path)!r} is not a list of modules", hint="download it again")
    return [(p.text("type").rpartition(".")[2], os.path.basename(p.text("path"))) for p in parts]


def _kind(path: str) -> str:
    fields = CheckpointFields(read_json(path, is_needed=True), path)
    if fields.has("pooling_mode"):
        asked = [fields.text("pooling_mode")]
        found = [kind for kind in (CLS, MEAN, LAST) if asked[0] in (kind, f"{kind}token")]
    else:
        asked = [key for key in _plain_modes(path) if fields.flag(key, default=False)]
        found = [_MODES[key] for key in asked if key in _MODES]
    if len(asked) != 1 or len(found) != 1:
        raise ModelError(
            f"{printable(path)!r} pools by {', '.join(asked) or 'nothing'}",
            hint=f"one of {', '.join(_MODES)} is known here",
        )
    return found[0]


def _dense(folder: str) -> DenseFacts:
    path = os.path.join(folder, "config.json")
    fields = CheckpointFields(read_json(path, is_needed=True), path)
    asked = fields.text("activation_function", default="torch.nn.modules.activation.Tanh")
    activation = asked.rpartition(".")[2].lower()
    if activation not in DENSE_ACTIVATIONS:
        raise fields.error("activation_function", asked, " or ".join(DENSE_ACTIVATIONS))
    return DenseFacts(
        os.path.join(folder, "model.safetensors"),
        fields.integer("in_features", 1, MAX_WIDTH),
        fields.integer("out_features", 1, MAX_WIDTH),
        fields.flag("bias", default=True),
        activation,
    )


def _plain_modes(path: str) -> list[str]:
    return [key for key in read_json(path, is_needed=True) if key.startswith("pooling_mode_")]
