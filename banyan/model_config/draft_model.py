"""Draft models: find one, read its ModelConfig, and check that it fits the target model.

Covers STANDALONE (a smaller model), EAGLE and EAGLE3 (trained draft models), DFLASH (block drafts,
arXiv 2602.06036) and NEXTN (the MTP layer of the target's checkpoint). Loads no weights.

A list of the tokens that a draft model may draft is read from safetensors, JSON or numpy's .npy;
none of them can run code.

Source of the DFlash configuration: the authors' reference (z-lab/dflash) and their checkpoints.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from banyan.base.errors import ConfigError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import logger, printable
from banyan.config.env import Environment
from banyan.config.schema import Config, LoadConfig, SpeculativeConfig
from banyan.families import FAMILIES
from banyan.families.base import MAX_WIDTH
from banyan.hub.sources import fetch
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.checkpoint_fields import CheckpointFields, read_json
from banyan.model_config.model_config import FULL, DraftModelFields, ModelConfig

log = logger(__name__)

Rule = Callable[[Config, ModelConfig, Environment], Config]

_LLAMA = "LlamaForCausalLM"
_EAGLE3 = "EAGLE3"
_EAGLE_CLASSES = {
    "EAGLE": ("LlamaForCausalLMEagle", _LLAMA),
    _EAGLE3: ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", _LLAMA),
}
"""Algorithm -> classes that configurations of its draft models name."""
_EAGLE_TARGETS = (_LLAMA, "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Target classes that EAGLE and EAGLE3 support."""
_WITHOUT_EAGLE = "use --speculative-algorithm STANDALONE with a small model, or NGRAM"
_TOKEN_MAP = "--speculative-token-map"
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_MAX_EAGLE_AUX_LAYERS = 8

_DFLASH_CLASS, _DFLASH_BODY = "DFlashDraftModel", "Qwen3ForCausalLM"
"""The class that a DFlash configuration names, and the class whose layers it has."""
_DFLASH_TARGETS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
)
"""Target classes that DFLASH supports."""
_WITHOUT_DFLASH = "use --speculative-algorithm EAGLE3 where there is a model for this one, or NGRAM"
_DFLASH_KEYS = {
    "mask_token",
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "num_target_layers",
}
"""Known keys of `dflash_config`. Any other key changes what such a model computes."""
_DEFAULT_BLOCK, _MAX_BLOCK = 16, 64
_MAX_DFLASH_AUX_LAYERS = 16


def draft_of(config: Config) -> LoadConfig:
    """How to read the draft model.

    Flags about the target's files do not apply to it; flags about dtype and numerics do.
    """
    speculative = config.speculative
    if speculative.is_mtp:
        return config.model
    return replace(
        config.model,
        source=speculative.draft_source,
        path=speculative.draft_path,
        revision=speculative.draft_revision,
        load_format=speculative.draft_load_format,
        quantization=speculative.draft_quantization,
        torchao="",
        implementation="native",
        is_embedding=False,
        config_file=speculative.draft_config_file,
        overrides={},
        loader_functions=(),
        hooks=(),
        dump_folder="",
        injects=False,
        marks_layers=False,
        deletes=0,
    )


def draft_model_config(
    speculative: SpeculativeConfig, model: LoadConfig, served: ModelConfig
) -> ModelConfig:
    """The ModelConfig of a draft model with its own checkpoint.

    Args:
        model: where the draft model is.
        served: the target model.

    Raises:
        ConfigError, ModelError: it cannot be read, or is no draft model of this algorithm.
    """
    if speculative.is_eagle:
        return eagle_model_config(speculative, model, served)
    if speculative.is_block:
        return dflash_model_config(model, served)
    return read_model_config(model.path, model.load_format, config_file=model.config_file)


def find_draft_model(
    config: Config,
    model_config: ModelConfig,
    environment: Environment,
    check_quantization: Rule,
) -> Config:
    """Fetch the draft model and check that it fits the target.

    Args:
        model_config: of the target.
        check_quantization: the rule that resolves --quantization, applied to the draft model.

    Returns:
        the config with the draft model's path, quantization and number of draft tokens.

    Raises:
        ConfigError, ModelError: the draft model is missing, or does not fit.
    """
    speculative = config.speculative
    if speculative.algorithm:
        _refuse_token_map(speculative)
    if not speculative.is_model:
        return config
    flag = f"--speculative-algorithm {speculative.algorithm}"
    if speculative.is_mtp:
        _check_mtp(config, model_config, flag)
        return config
    if not speculative.draft_source:
        raise ConfigError(
            f"{flag} needs --speculative-draft-model-path",
            hint="name the one that was trained for this model, or use NGRAM, which needs none"
            if speculative.algorithm in ("EAGLE3", "DFLASH")
            else "name a small model of the same vocabulary, or use NGRAM, which needs none",
        )
    model = draft_of(config)
    model = replace(model, path=fetch(model, environment))
    draft = draft_model_config(speculative, model, model_config)
    _check_pair(config, model_config, draft, model.source)
    try:
        checked = check_quantization(replace(config, model=model), draft, environment)
    except ConfigError as error:
        raise ConfigError(
            error.text.replace("--quantization", "--speculative-draft-model-quantization"),
            error.hint,
        ) from None
    found = replace(
        speculative,
        draft_path=draft.path,
        draft_quantization=checked.model.quantization,
        token_map=speculative.token_map and os.path.abspath(speculative.token_map),
    )
    if speculative.is_block and draft.draft_fields is not None:
        tokens = found.block_size or found.num_tokens or draft.draft_fields.block
        found = replace(found, num_tokens=tokens)
    return replace(config, speculative=found)


def _check_mtp(config: Config, model_config: ModelConfig, flag: str) -> None:
    """Refuse a checkpoint without an MTP layer, and flags about a separate draft model."""
    speculative = config.speculative
    given = {
        "--speculative-draft-model-path": speculative.draft_source,
        "--speculative-draft-model-revision": speculative.draft_revision,
        "--decrypted-draft-config-file": speculative.draft_config_file,
        "--speculative-draft-load-format": speculative.draft_load_format != "auto",
        "--speculative-draft-model-quantization": speculative.draft_quantization,
    }
    if others := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"{others[0]} and {flag}: the draft layer is part of the served model's checkpoint",
            hint="leave it out, or use --speculative-algorithm STANDALONE",
        )
    another = "use --speculative-algorithm STANDALONE with a small model, or NGRAM"
    if config.model.implementation == "transformers":
        raise ConfigError(f"{flag} and --model-impl transformers exclude each other", hint=another)
    if not model_config.num_mtp_layers:
        raise ConfigError(
            f"{flag}: {printable(model_config.path)} has no layer for drafting "
            "(num_nextn_predict_layers, nextn_predict_layers)",
            hint="DeepSeek-V3, V3.2, GLM-4.5, GLM-5, MiMo, Qwen3-Next and Qwen3.5 bring one; EAGLE "
            "takes a trained draft model as --speculative-draft-model-path; or "
            f"{another}",
        )
    mtp = FAMILIES.load(model_config.architecture).mtp
    if mtp is None or model_config.format not in mtp.names:
        raise ConfigError(
            f"{flag}: the layer for drafting of {model_config.architecture} cannot be loaded "
            f"from {model_config.format}",
            hint=another,
        )


def _check_pair(config: Config, model_config: ModelConfig, draft: ModelConfig, source: str) -> None:
    """Refuse a draft model whose vocabulary, size or kind does not suit the target."""
    name = f"--speculative-draft-model-path {printable(source)}"
    if draft.pooling is not None or draft.is_encoder:
        raise ConfigError(
            f"{name} is an embedding model and generates no tokens",
            hint="name a text generation model",
        )
    if config.speculative.is_eagle:
        _check_eagle(config, model_config, draft, name)
    if config.speculative.is_block:
        _check_dflash(config, model_config, draft, name)
    if draft.vocab_size != model_config.vocab_size:
        raise ConfigError(
            f"{name} has {draft.vocab_size:,} tokens, the served model "
            f"{model_config.vocab_size:,}: their token ids differ",
            hint="name a smaller model of the same family",
        )
    mine, its = weights_per_token(draft), weights_per_token(model_config)
    if mine > its and not config.speculative.is_trained:
        raise ConfigError(
            f"{name} reads {mine / 1e6:,.0f} million weights for a token, the served model "
            f"{its / 1e6:,.0f} million: its drafts would take longer than the answers",
            hint="name a smaller model, or swap the two",
        )
    if draft.has_states:
        raise ConfigError(
            f"{name} keeps a recurrent state, which cannot be rolled back after a wrong draft",
            hint="name a model with attention layers only",
        )
    tp = (
        config.parallel.attention_ranks if config.parallel.uses_dp_attention else config.parallel.tp
    )
    if not fits(draft, tp, tp if config.parallel.ep > 1 else 1, config.parallel.cp, True):
        raise ConfigError(
            f"{name}: {tp} ranks do not divide its {draft.num_heads:,} heads, "
            f"{draft.num_kv_heads:,} KV heads and {draft.intermediate_size:,} MLP columns",
            hint="choose another --tensor-parallel-size, or another draft model",
        )
    if draft.context_length < model_config.context_length:
        log.warning(
            "%s was trained for %s tokens: acceptance drops past that length",
            name,
            f"{draft.context_length:,}",
        )


def eagle_model_config(
    speculative: SpeculativeConfig, model: LoadConfig, served: ModelConfig
) -> ModelConfig:
    """The ModelConfig of an EAGLE or EAGLE3 draft model for the target `served`.

    Raises:
        ConfigError, ModelError: it cannot be read, or was made for another algorithm.
    """
    name = f"--speculative-draft-model-path {printable(model.source)}"
    where = model.config_file or os.path.join(model.path, "config.json")
    fields = read_json(where, is_needed=True)
    algorithm, named = speculative.algorithm, fields.get("architectures")
    kind = _eagle_kind(fields, algorithm)
    if kind != algorithm:
        raise ConfigError(
            f"{name}: --speculative-algorithm {algorithm} reads draft models of "
            f"{', '.join(_EAGLE_CLASSES[algorithm])}, and this is {printable(str(named), 80)}"
            + (f" of {kind}'s kind" if kind else ""),
            hint=f"use --speculative-algorithm {kind}" if kind else _WITHOUT_EAGLE,
        )
    model_config = read_model_config(
        model.path,
        model.load_format,
        overrides={"architectures": [_LLAMA]},
        config_file=model.config_file,
    )
    if kind != _EAGLE3:
        tokens = _token_map_ids(speculative.token_map, served.vocab_size)
        return (
            replace(model_config, draft_fields=DraftModelFields(len(tokens), tokens=tokens))
            if tokens
            else model_config
        )
    eagle = _eagle3_fields(CheckpointFields(fields, where), model_config, served, name)
    return replace(model_config, draft_fields=eagle, tie_embeddings=False)


def _token_map_ids(path: str, vocab_size: int) -> tuple[int, ...]:
    """The ids of a token map file in ascending order; () without a file."""
    if not path:
        return ()
    from banyan.formats.arrays import read_token_map  # imports numpy only if needed

    ids = read_token_map(path, _TOKEN_MAP)
    wrong = next((each for each in ids if not 0 <= each < vocab_size), None)
    if not ids or wrong is not None or len(set(ids)) < len(ids):
        why = "no token" if not ids else "a token twice"
        why = why if wrong is None else f"token {wrong}, the model has {vocab_size:,}"
        raise ConfigError(f"{_TOKEN_MAP} {printable(path)} names {why}", hint="name another file")
    return tuple(sorted(ids))


def _refuse_token_map(speculative: SpeculativeConfig) -> None:
    """Refuse --speculative-token-map with an algorithm that does not read it."""
    if not speculative.token_map or (speculative.is_eagle and speculative.algorithm == "EAGLE"):
        return
    why = "it is for --speculative-algorithm EAGLE with --speculative-draft-model-path"
    if speculative.algorithm == _EAGLE3:
        why = "an EAGLE3 model names its own draft vocabulary"
    raise ConfigError(
        f"{_TOKEN_MAP} and --speculative-algorithm {speculative.algorithm}: {why}",
        hint="leave it out",
    )


def _eagle_kind(fields: Mapping[str, object], asked: str) -> str:
    """The algorithm that a draft model was made for; "" for none of them."""
    named = fields.get("architectures")
    if not is_list(named):
        return ""
    kinds = [kind for kind, its in _EAGLE_CLASSES.items() if set(map(str, named)) & set(its)]
    if len(kinds) > 1:  # both algorithms use Llama's class name
        return _EAGLE3 if "draft_vocab_size" in fields else asked
    return kinds[0] if kinds else ""


def _eagle3_fields(
    fields: CheckpointFields, model_config: ModelConfig, served: ModelConfig, name: str
) -> DraftModelFields:
    """The fields of an EAGLE3 configuration that describe drafting."""
    known = fields.integer(
        "draft_vocab_size", 1, model_config.vocab_size, default=model_config.vocab_size
    )
    own = fields.part("eagle_config") or CheckpointFields({}, "")
    apart = {
        "num_hidden_layers": model_config.num_layers != 1,
        "use_aux_hidden_state": not own.flag("use_aux_hidden_state", default=True),
        "norm_before_residual": fields.flag("norm_before_residual", default=False),
        "target_hidden_size": fields.integer("target_hidden_size", 0, MAX_WIDTH, default=0)
        not in (0, served.hidden_size),
    }
    for key, is_apart in apart.items():
        if is_apart:
            raise ConfigError(
                f"{name}: {key} is not supported: an EAGLE3 model has one layer, which reads "
                f"hidden states of {served.hidden_size:,} numbers from the served model",
                hint=_WITHOUT_EAGLE,
            )
    # The list names layers by their outputs; ModelConfig counts inputs, hence the + 1.
    layers: list[object] = [
        layer + 1 if isinstance(layer, int) and not isinstance(layer, bool) else layer
        for layer in own.listed(_AUX_LAYERS) or fields.listed(_AUX_LAYERS)
    ]
    if not layers:
        layers = [2, served.num_layers // 2, served.num_layers - 3]
    numbers = sorted(
        layer for layer in layers if isinstance(layer, int) and 0 <= layer < served.num_layers
    )
    if len(numbers) < len(layers) or len(layers) > _MAX_EAGLE_AUX_LAYERS:
        raise ConfigError(
            f"{name} reads the inputs of layers {printable(str(layers), 80)} ({_AUX_LAYERS}), the "
            f"served model has {served.num_layers:,}",
            hint="name the draft model that was trained for this model",
        )
    return DraftModelFields(known, tuple(numbers))


def _check_eagle(config: Config, model_config: ModelConfig, draft: ModelConfig, name: str) -> None:
    """Refuse a draft model that cannot read the target's hidden states."""
    if (
        model_config.architecture not in _EAGLE_TARGETS
        or config.model.implementation == "transformers"
    ):
        raise ConfigError(
            f"--speculative-algorithm {config.speculative.algorithm}: "
            f"{printable(model_config.architecture)} is not supported; "
            f"supported are {', '.join(_EAGLE_TARGETS)}",
            hint=_WITHOUT_EAGLE,
        )
    if draft.hidden_size != model_config.hidden_size:
        raise ConfigError(
            f"{name} reads hidden states of {draft.hidden_size:,} numbers, the served "
            f"model has {model_config.hidden_size:,}",
            hint="name the one that was trained for this model",
        )


def dflash_model_config(model: LoadConfig, served: ModelConfig) -> ModelConfig:
    """The ModelConfig of a DFlash draft model for the target `served`.

    Raises:
        ConfigError, ModelError: it cannot be read, or is no DFlash model.
    """
    name = f"--speculative-draft-model-path {printable(model.source)}"
    where = model.config_file or os.path.join(model.path, "config.json")
    fields = CheckpointFields(read_json(where, is_needed=True), where)
    named = fields.any("architectures")
    if not is_list(named) or _DFLASH_CLASS not in named:
        raise ConfigError(
            f"{name}: --speculative-algorithm DFLASH reads draft models of {_DFLASH_CLASS}, and "
            f"this is {printable(str(named), 80)}",
            hint=_WITHOUT_DFLASH,
        )
    model_config = read_model_config(
        model.path,
        model.load_format,
        overrides={"architectures": [_DFLASH_BODY]},
        config_file=model.config_file,
    )
    own = fields.part("dflash_config") or CheckpointFields({}, where)
    given = fields.any("dflash_config")
    others = sorted(set(given) - _DFLASH_KEYS) if is_object(given) else []
    kinds = {str(kind) for kind in fields.listed("layer_types")} - {"full_attention"}
    if (
        others
        or kinds
        or any(model_config.kind_of(layer) != FULL for layer in range(model_config.num_layers))
    ):
        what = [f"dflash_config.{printable(key)}" for key in others] or ["layer_types"]
        raise ConfigError(
            f"{name} has {', '.join(what)}: only draft models of DFlash's first form are "
            "supported, with full attention in every layer",
            hint=_WITHOUT_DFLASH,
        )
    source = own if own.has("block_size") else fields
    block = source.integer("block_size", 2, _MAX_BLOCK, default=_DEFAULT_BLOCK)
    mask = own if own.has("mask_token_id") else fields
    eagle = DraftModelFields(
        served.vocab_size,
        _dflash_aux_layers(
            own if own.has("target_layer_ids") else fields, model_config, served, name
        ),
        block=block,
        mask=mask.integer("mask_token_id", 0, served.vocab_size - 1),
    )
    return replace(model_config, draft_fields=eagle, tie_embeddings=False)


def _dflash_aux_layers(
    fields: CheckpointFields, model_config: ModelConfig, served: ModelConfig, name: str
) -> tuple[int, ...]:
    """Layers of the target whose inputs the draft model reads.

    The configuration names layers by their outputs. The last layer's output is refused because the
    target normalizes it.
    """
    listed = fields.listed("target_layer_ids") or _default_aux_layers(
        served.num_layers, model_config.num_layers
    )
    ids = [each for each in listed if isinstance(each, int) and not isinstance(each, bool)]
    is_whole = len(ids) == len(listed) <= _MAX_DFLASH_AUX_LAYERS
    if not is_whole or any(not 0 <= each < served.num_layers - 1 for each in ids):
        raise ConfigError(
            f"{name} reads the outputs of layers {printable(str(listed), 80)} (target_layer_ids), "
            f"the served model has {served.num_layers:,}",
            hint="name the draft model that was trained for this model",
        )
    if sorted(set(ids)) != ids:
        raise ConfigError(
            f"{name} reads layers {printable(str(ids), 80)} (target_layer_ids): the list must be "
            "ascending, without repeats",
            hint=_WITHOUT_DFLASH,
        )
    return tuple(each + 1 for each in ids)


def _default_aux_layers(layers: int, drafts: int) -> list[object]:
    """As many layers as the draft model has, evenly spaced from the second to the third last."""
    if drafts == 1:
        return [layers // 2]
    return [round(1 + at * (layers - 4) / (drafts - 1)) for at in range(drafts)]


def _check_dflash(config: Config, model_config: ModelConfig, draft: ModelConfig, name: str) -> None:
    """Refuse a draft model that cannot read the target's hidden states, and conflicting flags."""
    speculative = config.speculative
    if (
        model_config.architecture not in _DFLASH_TARGETS
        or config.model.implementation == "transformers"
    ):
        raise ConfigError(
            f"--speculative-algorithm DFLASH: {printable(model_config.architecture)} is not "
            f"supported; supported are {', '.join(_DFLASH_TARGETS)}",
            hint=_WITHOUT_DFLASH,
        )
    if draft.hidden_size != model_config.hidden_size:
        raise ConfigError(
            f"{name} reads hidden states of {draft.hidden_size:,} numbers, the served "
            f"model has {model_config.hidden_size:,}",
            hint="name the one that was trained for this model",
        )
    tokens, block = speculative.num_tokens, speculative.block_size
    if tokens and block and tokens != block:
        raise ConfigError(
            f"--speculative-dflash-block-size {block} and --speculative-num-draft-tokens {tokens}: "
            "a row verifies one block",
            hint="leave one of the two out",
        )
    if draft.draft_fields is not None and max(tokens, block) > draft.draft_fields.block:
        log.warning(
            "%s was trained for blocks of %d tokens: acceptance drops in blocks of %d",
            name,
            draft.draft_fields.block,
            max(tokens, block),
        )
    if speculative.num_steps > 1 or speculative.eagle_topk > 1:
        raise ConfigError(
            f"--speculative-num-steps {speculative.num_steps} and --speculative-eagle-topk "
            f"{speculative.eagle_topk} with --speculative-algorithm DFLASH: a block is drafted in "
            "one pass, as one sequence",
            hint="leave both out; --speculative-num-draft-tokens sets the block length",
        )


def weights_per_token(model_config: ModelConfig) -> int:
    """Estimate how many weights one token reads."""
    total = model_config.vocab_size * model_config.hidden_size
    for layer in range(model_config.num_layers):
        heads = 2 * model_config.heads_of(layer) + 2 * model_config.num_kv_heads
        total += model_config.hidden_size * (
            heads * model_config.head_dim + 3 * model_config.inner_of(layer)
        )
    return total


def fits(model_config: ModelConfig, tp: int, ep: int, replicas: int, is_cut: bool) -> bool:
    """Whether `tp` ranks can share the model. Several ranks may hold copies of one KV head.

    Args:
        replicas: groups of ranks that each compute attention for different tokens; heads are
            divided among the ranks of one group.
        is_cut: dense feed-forward blocks are divided among all ranks.
    """
    kv_heads, ranks = model_config.num_kv_heads, tp // replicas
    experts = model_config.experts.inner if model_config.experts and ep == 1 else 0
    columns = (model_config.intermediate_size if is_cut else 0, experts)
    shares_kv = kv_heads % ranks == 0 or ranks % kv_heads == 0
    is_even = not any(size % tp for size in columns)
    states = model_config.state.units(model_config.hidden_size) if model_config.state else 0
    shares_heads = not any(
        heads % ranks for heads in (model_config.num_heads, model_config.window_heads)
    )
    return shares_kv and is_even and shares_heads and not states % ranks
