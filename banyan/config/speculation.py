"""Rules about speculative decoding: the number of drafts and the shape of draft trees."""

from dataclasses import fields, replace

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.devices import facts_of
from banyan.config.env import Environment
from banyan.config.flags.device import ATTENTION
from banyan.config.schema import Config, SpeculativeConfig
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

_MODEL_TOKENS = 4
"""Default tokens per row with a draft model: each draft costs a pass of that model."""
_TREE_MODELS = ("LlamaForCausalLM",)
"""Models for which EAGLE and EAGLE3 draft trees by default."""
_STEPS, _TOPK, _TOKENS = 5, 4, 8
"""The default tree."""


def plan_drafts(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    """Set the number of tokens and of draft steps per row."""
    speculative = config.speculative
    if not speculative.algorithm:
        nothing = SpeculativeConfig()
        for field in fields(SpeculativeConfig):
            if getattr(speculative, field.name) != getattr(nothing, field.name):
                log.warning(
                    "speculative %s has no effect without --speculative-algorithm",
                    field.name.replace("_", " "),
                )
        return config
    if not speculative.is_model:
        _check_ngram(speculative)
    speculative = _choose_tree(config, model_config)
    usual = _MODEL_TOKENS if speculative.is_model else speculative.max_match
    tokens = speculative.num_tokens or max(
        2, speculative.num_steps + 1 if speculative.num_steps else usual
    )
    steps = min(speculative.num_steps or tokens - 1, tokens - 1)
    if speculative.is_block:
        steps = tokens - 1
    return replace(config, speculative=replace(speculative, num_tokens=tokens, num_steps=steps))


def branching_flag(speculative: SpeculativeConfig) -> str:
    """Return the flag that makes drafts a tree, with its value; "" if drafts are chains."""
    if speculative.is_model and speculative.eagle_topk > 1:
        return f"--speculative-eagle-topk {speculative.eagle_topk}"
    if speculative.algorithm == "NGRAM" and speculative.min_breadth > 1:
        return f"--speculative-ngram-min-bfs-breadth {speculative.min_breadth}"
    return ""


def longest_branch(speculative: SpeculativeConfig) -> int:
    """Return the depth of the draft tree in tokens, the sampled one included; 0 for chains."""
    return speculative.num_steps + 1 if branching_flag(speculative) else 0


def _choose_tree(config: Config, model_config: ModelConfig) -> SpeculativeConfig:
    """Check the numbers of a draft tree, or choose the default tree."""
    speculative = config.speculative
    steps, topk, tokens = speculative.num_steps, speculative.eagle_topk, speculative.num_tokens
    if topk > 1:
        flag = branching_flag(speculative)
        if not (steps and tokens):
            raise ConfigError(
                f"{flag}: the size of the draft tree is not given",
                hint="give --speculative-num-steps (its levels) and "
                "--speculative-num-draft-tokens (its tokens and the one before them)",
            )
        most = topk + (steps - 1) * topk * topk
        if tokens - 1 > most:
            raise ConfigError(
                f"--speculative-num-draft-tokens {tokens}, --speculative-num-steps {steps} and "
                f"{flag}: such a tree has at most {most} drafts, not {tokens - 1}",
                hint=f"give --speculative-num-draft-tokens {most + 1} or less",
            )
        return speculative
    is_open = speculative.is_eagle and not (steps or topk or tokens)
    has_tree = model_config.architecture in _TREE_MODELS
    can_branch = facts_of(config).drafts_trees and config.parallel.cp == 1
    if not is_open or not has_tree or not can_branch or _has_plugin_attention(config):
        return speculative
    log.info("drafts are trees of %d tokens: %d branches, %d levels", _TOKENS - 1, _TOPK, _STEPS)
    return replace(speculative, num_steps=_STEPS, eagle_topk=_TOPK, num_tokens=_TOKENS)


def _has_plugin_attention(config: Config) -> bool:
    return config.device.attention not in ("", *ATTENTION)


def _check_ngram(speculative: SpeculativeConfig) -> None:
    if speculative.min_match > speculative.max_match:
        raise ConfigError(
            f"--speculative-ngram-min-match-window-size {speculative.min_match} is more than "
            f"--speculative-ngram-max-match-window-size {speculative.max_match}"
        )
    if speculative.branch <= speculative.min_match:
        raise ConfigError(
            f"--speculative-ngram-branch-length {speculative.branch} leaves no drafts "
            f"after a suffix of {speculative.min_match} tokens",
            hint="raise it, or lower --speculative-ngram-min-match-window-size",
        )
    if speculative.min_breadth > speculative.max_breadth:
        raise ConfigError(
            f"--speculative-ngram-min-bfs-breadth {speculative.min_breadth} is more than "
            f"--speculative-ngram-max-bfs-breadth {speculative.max_breadth}"
        )
    if speculative.capacity < speculative.branch:
        raise ConfigError(
            f"--speculative-ngram-capacity {speculative.capacity} does not hold one token, which "
            f"takes {speculative.branch} nodes"
        )
