"""The rule of --attn-cp-size; `config/rules/conflicts.py` lists the features that exclude it."""

from dataclasses import replace

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

_FLAG, _SWITCH = "--attn-cp-size", "--enable-prefill-cp"


def check_context_parallel(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Set the number of shards. Runs before the rules that count ranks per head."""
    parallel = config.parallel
    if parallel.divides_prompts and parallel.cp == 1 and parallel.tp > 1:
        log.info("set attn-cp-size=%d because of %s", parallel.tp, _SWITCH)
        parallel = replace(parallel, cp=parallel.tp)
        config = replace(config, parallel=parallel)
    if parallel.cp == 1:
        return config
    if parallel.tp % parallel.cp:
        raise ConfigError(
            f"{_FLAG} {parallel.cp}: --tensor-parallel-size {parallel.tp} ranks cannot be divided "
            f"into {parallel.cp} equal shards",
            hint=f"choose --tensor-parallel-size as a multiple of {parallel.cp}",
        )
    return config
