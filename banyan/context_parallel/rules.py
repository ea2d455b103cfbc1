"""Ranks that divide the tokens of prompts (--attn-cp-size): what that goes together with, decided
before anything is loaded. Part of `config/resolve.py`."""

import logging
from collections.abc import Iterator
from dataclasses import replace

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.config.speculation import what_branches
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

_FLAG, _SWITCH = "--attn-cp-size", "--enable-prefill-cp"


def check_the_context(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Before the ranks are counted: how many of them share the heads depends on it."""
    parallel = config.parallel
    if parallel.divides_prompts and parallel.cp == 1 and parallel.tp > 1:
        log.log(logging.INFO, "set attn-cp-size=%d because of %s", parallel.tp, _SWITCH)
        parallel = replace(parallel, cp=parallel.tp)
        config = replace(config, parallel=parallel)
    if parallel.cp == 1:
        return config
    if parallel.tp % parallel.cp:
        raise ConfigError(
            f"{_FLAG} {parallel.cp}: --tensor-parallel-size {parallel.tp} ranks cannot be shared "
            f"out among {parallel.cp} shares of a prompt",
            hint=f"choose --tensor-parallel-size as a multiple of {parallel.cp}: it counts all of "
            "them",
        )
    for is_there, other, hint in _others(config):
        if is_there:
            raise ConfigError(f"{_FLAG} cannot be combined with {other}", hint=hint)
    if model_config.pooling is not None:
        raise ConfigError(
            f"{_FLAG}: prompts of models for vectors are not divided", hint="leave it out"
        )
    if model_config.has_states:
        raise ConfigError(
            f"{_FLAG}: layers of this model keep a state, which takes in one token after another",
            hint="leave it out; --tensor-parallel-size cuts them",
        )
    return config


def _others(config: Config) -> Iterator[tuple[bool, str, str]]:
    """What it does not go with: whether that is there, its flag, and what to do."""
    parallel, experts = config.parallel, config.experts
    ranks = "use --tensor-parallel-size alone"
    yield parallel.uses_dp_attention, "--enable-dp-attention", "leave one of them out"
    yield parallel.pp > 1, "--pipeline-parallel-size", ranks
    yield (
        config.model.implementation == "transformers",
        "--model-impl transformers",
        "leave --model-impl at auto",
    )
    sees_all = "leave it out: each rank would see its share of the tokens"
    yield bool(config.model.hooks), "--forward-hooks", sees_all
    yield bool(config.model.dump_folder), "--debug-tensor-dump-output-folder", sees_all
    yield config.model.injects, "--debug-tensor-dump-inject", sees_all
    yield bool(config.cache.store), "--hicache-storage-backend", "prefixes are kept in memory"
    branching = what_branches(config.speculative)
    yield bool(branching), branching, "leave it at 1: a row whose drafts branch is not cut"
    blocks = config.speculative.is_block
    yield blocks, "--speculative-algorithm DFLASH", "use EAGLE3 or NGRAM: a block is not cut"
    yield bool(experts.recorder), "--expert-distribution-recorder-mode", ranks
    yield experts.are_told, "--enable-return-routed-experts", ranks
    yield experts.balances, "--enable-eplb", ranks
    yield bool(experts.redundant), "--ep-num-redundant-experts", ranks
    yield bool(experts.dispatch), "--ep-dispatch-algorithm", ranks
    yield experts.location != "trivial", "--init-expert-location", ranks
