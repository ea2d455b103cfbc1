"""Models that draft a block at once for another one (DFlash, arXiv 2602.06036): what their
configurations say, and what they do not go with. Part of `model_config/draft_model.py`; loads no
weights.

Source of the form: the authors' reference (z-lab/dflash) and the checkpoints that they published.
"""

import os
from dataclasses import replace

from banyan.base.errors import ConfigError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import logger, printable
from banyan.config.schema import Config, LoadConfig
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.facts import Facts, read_json
from banyan.model_config.model_config import FULL, DraftModelFields, ModelConfig

log = logger(__name__)

_CLASS, _BODY = "DFlashDraftModel", "Qwen3ForCausalLM"
"""The class that such a configuration names, and the one whose blocks it has."""
_FOLLOWED = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("Qwen3MoeForCausalLM", "GptOssForCausalLM"),
)
"""Classes of models that they draft for."""
_ANOTHER = "use --speculative-algorithm EAGLE3 where there is a model for this one, or NGRAM"
_KNOWN = {"mask_token", "mask_token_id", "target_layer_ids", "block_size", "num_target_layers"}
"""Of `dflash_config`; whatever else is there changes what such a model computes."""
_USUAL_BLOCK, _MOST_BLOCK = 16, 64
_MOST_TAPS = 16


def dflash_model_config(model: LoadConfig, served: ModelConfig) -> ModelConfig:
    """Card of a draft model, for the model of `served`.

    Raises:
        ConfigError, ModelError: it cannot be read, or is not of this kind.
    """
    name = f"--speculative-draft-model-path {printable(model.source)}"
    where = os.path.join(model.path, "config.json")
    facts = Facts(read_json(where, is_needed=True), where)
    named = facts.any("architectures")
    if not is_list(named) or _CLASS not in named:
        raise ConfigError(
            f"{name}: --speculative-algorithm DFLASH reads draft models of {_CLASS}, and this is "
            f"{printable(str(named), 80)}",
            hint=_ANOTHER,
        )
    model_config = read_model_config(
        model.path, model.load_format, overrides={"architectures": [_BODY]}
    )
    told = facts.part("dflash_config") or Facts({}, where)
    given = facts.any("dflash_config")
    others = sorted(set(given) - _KNOWN) if is_object(given) else []
    kinds = {str(kind) for kind in facts.listed("layer_types")} - {"full_attention"}
    if (
        others
        or kinds
        or any(model_config.kind_of(layer) != FULL for layer in range(model_config.num_layers))
    ):
        what = [f"dflash_config.{printable(key)}" for key in others] or ["layer_types"]
        raise ConfigError(
            f"{name} says {', '.join(what)}: draft models of DFlash's first form are read, whose "
            "layers attend to everything",
            hint=_ANOTHER,
        )
    source = told if told.has("block_size") else facts
    block = source.integer("block_size", 2, _MOST_BLOCK, default=_USUAL_BLOCK)
    mask = told if told.has("mask_token_id") else facts
    eagle = DraftModelFields(
        served.vocab_size,
        _taps_of(told if told.has("target_layer_ids") else facts, model_config, served, name),
        block=block,
        mask=mask.integer("mask_token_id", 0, served.vocab_size - 1),
    )
    return replace(model_config, eagle=eagle, tie_embeddings=False)


def _taps_of(
    facts: Facts, model_config: ModelConfig, served: ModelConfig, name: str
) -> tuple[int, ...]:
    """The served model's layers whose inputs it reads. What is listed are layers whose outputs it
    reads, and the last one's are behind a norm."""
    listed = facts.listed("target_layer_ids") or _usual(served.num_layers, model_config.num_layers)
    ids = [each for each in listed if isinstance(each, int) and not isinstance(each, bool)]
    is_whole = len(ids) == len(listed) <= _MOST_TAPS
    if not is_whole or any(not 0 <= each < served.num_layers - 1 for each in ids):
        raise ConfigError(
            f"{name} reads the outputs of layers {printable(str(listed), 80)} (target_layer_ids), "
            f"the served model has {served.num_layers:,}",
            hint="name the draft model that was trained for this model",
        )
    if sorted(set(ids)) != ids:
        raise ConfigError(
            f"{name} reads layers {printable(str(ids), 80)} (target_layer_ids), which are read "
            "from the first on, each once",
            hint=_ANOTHER,
        )
    return tuple(each + 1 for each in ids)


def _usual(layers: int, drafts: int) -> list[object]:
    """As many layers as the draft model has, evenly between the second and the third last."""
    if drafts == 1:
        return [layers // 2]
    return [round(1 + at * (layers - 4) / (drafts - 1)) for at in range(drafts)]


def check_the_dflash(
    config: Config, model_config: ModelConfig, draft: ModelConfig, name: str
) -> None:
    """Refuse a model that cannot read what comes to the served one's layers."""
    speculative = config.speculative
    if model_config.architecture not in _FOLLOWED or config.model.implementation == "transformers":
        raise ConfigError(
            f"--speculative-algorithm DFLASH: {printable(model_config.architecture)} is not "
            "drafted for; "
            f"{', '.join(_FOLLOWED)} are",
            hint=_ANOTHER,
        )
    if draft.hidden_size != model_config.hidden_size:
        raise ConfigError(
            f"{name} reads hidden states of {draft.hidden_size:,} numbers, those of the served "
            f"model have {model_config.hidden_size:,}",
            hint="name the one that was trained for this model",
        )
    tokens, block = speculative.num_tokens, speculative.block_size
    if tokens and block and tokens != block:
        raise ConfigError(
            f"--speculative-dflash-block-size {block} and --speculative-num-draft-tokens {tokens}: "
            "a row verifies one block",
            hint="leave one of the two out",
        )
    if draft.eagle is not None and max(tokens, block) > draft.eagle.block:
        log.warning(
            "%s was trained for blocks of %d tokens: of %d it drafts badly",
            *(name, draft.eagle.block, max(tokens, block)),
        )
    if speculative.num_steps > 1 or speculative.eagle_topk > 1:
        raise ConfigError(
            f"--speculative-num-steps {speculative.num_steps} and --speculative-eagle-topk "
            f"{speculative.eagle_topk} with --speculative-algorithm DFLASH: a block is drafted in "
            "one pass, one token behind another",
            hint="leave both out; --speculative-num-draft-tokens says how long a block is",
        )
