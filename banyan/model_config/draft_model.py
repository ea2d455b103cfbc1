"""The model that drafts beside the one that is served: where it is, and whether the two can work
together. Part of `config/resolve.py`; loads no weights.
"""

import os
from collections.abc import Callable
from dataclasses import replace

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.env import Environment
from banyan.config.schema import Config, LoadConfig, SpeculativeConfig
from banyan.families import FAMILIES
from banyan.hub.sources import fetch
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.dflash import check_the_dflash, dflash_model_config
from banyan.model_config.eagle import check_the_eagle, eagle_model_config, refuse_the_map
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

Rule = Callable[[Config, ModelConfig, Environment], Config]


def draft_of(config: Config) -> LoadConfig:
    """How the draft model is read. What the flags say about the served model's files does not hold
    for it, and what they say about numbers does."""
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
        overrides={},
        loader_functions=(),
        hooks=(),
        dump_folder="",
        injects=False,
        deletes=0,
    )


def draft_model_config(
    speculative: SpeculativeConfig, model: LoadConfig, served: ModelConfig
) -> ModelConfig:
    """Card of a draft model with a checkpoint of its own, for the model of `served`.

    Raises:
        ConfigError, ModelError: it cannot be read, or is no draft model of the kind that is asked.
    """
    if speculative.is_eagle:
        return eagle_model_config(speculative, model, served)
    if speculative.is_block:
        return dflash_model_config(model, served)
    return read_model_config(model.path, model.load_format)


def find_draft_model(
    config: Config,
    model_config: ModelConfig,
    environment: Environment,
    check_quantization: Rule,
) -> Config:
    """Fetch the draft model and see whether it goes with the one of `model_config`.

    Raises:
        ConfigError, ModelError: it is not there, or does not.
    """
    speculative = config.speculative
    if speculative.algorithm:
        refuse_the_map(speculative)
    if not speculative.is_model:
        return config
    flag = f"--speculative-algorithm {speculative.algorithm}"
    if speculative.is_mtp:
        _check_mtp_layers(config, model_config, flag)
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
    _check_the_pair(config, model_config, draft, model.source)
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
    if speculative.is_block and draft.eagle is not None:
        tokens = found.block_size or found.num_tokens or draft.eagle.block
        found = replace(found, num_tokens=tokens)
    return replace(config, speculative=found)


def _check_mtp_layers(config: Config, model_config: ModelConfig, flag: str) -> None:
    """Refuse what brings no layer for drafting, and flags about models that are elsewhere."""
    speculative = config.speculative
    given = {
        "--speculative-draft-model-path": speculative.draft_source,
        "--speculative-draft-model-revision": speculative.draft_revision,
        "--speculative-draft-load-format": speculative.draft_load_format != "auto",
        "--speculative-draft-model-quantization": speculative.draft_quantization,
    }
    if others := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"{others[0]} and {flag}: what drafts is a layer of the served model's own checkpoint",
            hint="leave it out, or use --speculative-algorithm STANDALONE",
        )
    another = "use --speculative-algorithm STANDALONE with a small model, or NGRAM"
    if config.model.implementation == "transformers":
        raise ConfigError(f"{flag} and --model-impl transformers exclude each other", hint=another)
    if not model_config.num_mtp_layers:
        raise ConfigError(
            f"{flag}: {printable(model_config.path)} says nothing of a layer for drafting "
            "(num_nextn_predict_layers, nextn_predict_layers)",
            hint="DeepSeek-V3, V3.2, GLM-4.5, GLM-5, MiMo, Qwen3-Next and Qwen3.5 bring one; EAGLE "
            "takes a model that was trained to draft as --speculative-draft-model-path; or "
            f"{another}",
        )
    mtp = FAMILIES.load(model_config.architecture).mtp
    if mtp is None or model_config.format not in mtp.names:
        raise ConfigError(
            f"{flag}: the layer for drafting of {model_config.architecture} is not run here from "
            f"{model_config.format}",
            hint=another,
        )


def _check_the_pair(
    config: Config, model_config: ModelConfig, draft: ModelConfig, source: str
) -> None:
    name = f"--speculative-draft-model-path {printable(source)}"
    if draft.pooling is not None or draft.is_encoder:
        raise ConfigError(f"{name} makes vectors, and no tokens", hint="name a model for text")
    if config.speculative.is_eagle:
        check_the_eagle(config, model_config, draft, name)
    if config.speculative.is_block:
        check_the_dflash(config, model_config, draft, name)
    if draft.vocab_size != model_config.vocab_size:
        raise ConfigError(
            f"{name} has {draft.vocab_size:,} tokens, the served model "
            f"{model_config.vocab_size:,}: what "
            "one drafts the other could not read",
            hint="name a smaller model of the same family",
        )
    mine, its = weights_per_token(draft), weights_per_token(model_config)
    if mine > its and not config.speculative.is_trained:
        raise ConfigError(
            f"{name} reads {mine / 1e6:,.0f} million weights for a token, the served model "
            f"{its / 1e6:,.0f} million: its drafts would take longer than the answers",
            hint="name a smaller model, or serve this one and let the other draft",
        )
    if draft.has_states:
        raise ConfigError(
            f"{name} keeps a recurrent state, which does not go back where a draft was wrong",
            hint="name a model that attends",
        )
    tp = (
        config.parallel.attention_ranks if config.parallel.uses_dp_attention else config.parallel.tp
    )
    if not fits(draft, tp, tp if config.parallel.ep > 1 else 1, config.parallel.cp, True):
        raise ConfigError(
            f"{name}: a number of {tp} ranks does not divide its {draft.num_heads:,} heads, "
            f"{draft.num_kv_heads:,} KV heads and {draft.intermediate_size:,} MLP columns",
            hint="choose another --tensor-parallel-size, or another draft model",
        )
    if draft.context_length < model_config.context_length:
        log.warning(
            "%s was trained for %s tokens: behind those of a request it drafts badly",
            *(name, f"{draft.context_length:,}"),
        )


def weights_per_token(model_config: ModelConfig) -> int:
    """About how many weights are read for one token."""
    total = model_config.vocab_size * model_config.hidden_size
    for layer in range(model_config.num_layers):
        heads = 2 * model_config.heads_of(layer) + 2 * model_config.num_kv_heads
        total += model_config.hidden_size * (
            heads * model_config.head_dim + 3 * model_config.inner_of(layer)
        )
    return total


def fits(model_config: ModelConfig, tp: int, ep: int, replicas: int, is_cut: bool) -> bool:
    """Whether `tp` ranks can share the model; KV heads may also be had by several ranks each.

    replicas: among which the ranks are shared out, as far as heads go; is_cut: the blocks without
    experts are.
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
