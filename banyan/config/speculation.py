"""Rules about drafts: how many there are, and what they do not go with. Part of
`config/resolve.py`; knows no drafters.
"""

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
"""Tokens of a row where a model drafts: each draft is a pass of it."""
_BRANCHING = ("LlamaForCausalLM",)
_STEPS, _TOPK, _TOKENS = 5, 4, 8
"""What models that were trained to draft for one of these classes draft, unless told otherwise."""
_ANOTHER_DRAFT = "use --speculative-algorithm NGRAM, which needs no model"


def plan_the_drafts(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    speculative = config.speculative
    if not speculative.algorithm:
        nothing = SpeculativeConfig()
        for field in fields(SpeculativeConfig):
            if getattr(speculative, field.name) != getattr(nothing, field.name):
                log.warning(
                    "speculative %s has no effect: nothing drafts without --speculative-algorithm",
                    field.name.replace("_", " "),
                )
        return config
    _check(config, model_config)
    speculative = _choose_the_tree(config, model_config)
    usual = _MODEL_TOKENS if speculative.is_model else speculative.max_match
    tokens = speculative.num_tokens or max(
        2, speculative.num_steps + 1 if speculative.num_steps else usual
    )
    steps = min(speculative.num_steps or tokens - 1, tokens - 1)
    if speculative.is_block:
        steps = tokens - 1
    return replace(config, speculative=replace(speculative, num_tokens=tokens, num_steps=steps))


def what_branches(speculative: SpeculativeConfig) -> str:
    """The flag that lets drafts branch, with its value; "" where they are chains."""
    if speculative.is_model and speculative.eagle_topk > 1:
        return f"--speculative-eagle-topk {speculative.eagle_topk}"
    if speculative.algorithm == "NGRAM" and speculative.min_breadth > 1:
        return f"--speculative-ngram-min-bfs-breadth {speculative.min_breadth}"
    return ""


def longest_branch(speculative: SpeculativeConfig) -> int:
    """In tokens, the one that was sampled included; 0 = drafts are chains."""
    return speculative.num_steps + 1 if what_branches(speculative) else 0


def _choose_the_tree(config: Config, model_config: ModelConfig) -> SpeculativeConfig:
    """Refuse numbers of which no tree can be, and say what is drafted where none is given."""
    speculative = config.speculative
    steps, topk, tokens = speculative.num_steps, speculative.eagle_topk, speculative.num_tokens
    if topk > 1:
        flag = what_branches(speculative)
        if not (steps and tokens):
            raise ConfigError(
                f"{flag}: how large a tree may be is not said",
                hint="give --speculative-num-steps, its levels, and "
                "--speculative-num-draft-tokens, all of its tokens and the one before them",
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
    can_branch = facts_of(config).drafts_trees and config.parallel.cp == 1
    if (
        not is_open
        or model_config.architecture not in _BRANCHING
        or not can_branch
        or _other(config)
    ):
        return speculative
    log.info("drafts are trees of %d tokens: %d ways, %d levels", _TOKENS - 1, _TOPK, _STEPS)
    return replace(speculative, num_steps=_STEPS, eagle_topk=_TOPK, num_tokens=_TOKENS)


def _other(config: Config) -> bool:
    """Whether attention is another one than the built-in one."""
    return config.device.attention not in ("", *ATTENTION)


def _check(config: Config, model_config: ModelConfig) -> None:
    """Refuse what drafts do not go with, by name."""
    speculative = config.speculative
    flag = f"--speculative-algorithm {speculative.algorithm}"
    if model_config.pooling is not None:
        raise ConfigError(
            f"{flag}: this model makes vectors, and no tokens to draft", hint="leave it out"
        )
    if config.parallel.pp > 1:
        raise ConfigError(
            f"{flag} and --pipeline-parallel-size {config.parallel.pp}: drafts are not verified "
            "by stages",
            hint="use --tensor-parallel-size",
        )
    if speculative.algorithm != "NGRAM" and speculative.min_breadth > 1:
        raise ConfigError(
            f"--speculative-ngram-min-bfs-breadth {speculative.min_breadth} and {flag}: it says "
            "how NGRAM branches",
            hint="leave it out",
        )
    if speculative.block_size and not speculative.is_block:
        raise ConfigError(
            f"--speculative-dflash-block-size {speculative.block_size} and {flag}: it says how "
            "long the blocks of DFLASH are",
            hint="leave it out; --speculative-num-draft-tokens says how much is verified at once",
        )
    if speculative.is_block and _other(config):
        raise ConfigError(
            f"{flag} and --attention-backend {config.device.attention}: masks of a block that read "
            "each other are read by the built-in attention alone",
            hint="leave one of the two out",
        )
    if speculative.eagle_topk > 1 and not speculative.is_model:
        raise ConfigError(
            f"--speculative-eagle-topk {speculative.eagle_topk} and {flag}: it says how drafts of "
            "a model branch",
            hint="leave it out; --speculative-ngram-min-bfs-breadth lets drafts of NGRAM branch",
        )
    if what_branches(speculative) and _other(config):
        raise ConfigError(
            f"{what_branches(speculative)} and --attention-backend {config.device.attention}: "
            "drafts that branch are read by the built-in attention alone",
            hint="leave one of the two out",
        )
    if speculative.is_model:
        _check_beside(config, flag)
        return
    if speculative.draft_source:
        raise ConfigError(
            f"--speculative-draft-model-path and {flag}: it drafts without a model",
            hint="leave the model out, or use --speculative-algorithm STANDALONE",
        )
    if speculative.min_match > speculative.max_match:
        raise ConfigError(
            f"--speculative-ngram-min-match-window-size {speculative.min_match} is more than "
            f"--speculative-ngram-max-match-window-size {speculative.max_match}"
        )
    if speculative.branch <= speculative.min_match:
        raise ConfigError(
            f"--speculative-ngram-branch-length {speculative.branch} leaves no room for drafts "
            f"behind a suffix of {speculative.min_match} tokens",
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


def _check_beside(config: Config, flag: str) -> None:
    """Refuse what a draft model does not go with."""
    if config.parallel.nodes > 1 and not config.speculative.is_mtp:
        raise ConfigError(
            f"{flag} and {config.parallel.nodes_flag}: a draft model is not looked for on "
            "other machines",
            hint=_ANOTHER_DRAFT,
        )
    if config.device.memory_saver:
        raise ConfigError(
            f"{flag} and --enable-memory-saver: the weights of a draft model are not released",
            hint="leave one of the two out",
        )
