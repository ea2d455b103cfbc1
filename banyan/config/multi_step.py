"""What several decode steps in one plan do not go with. Part of `config/resolve.py`.

Where the flags leave their number open there is one step beside what they do not go with.
"""

from dataclasses import replace

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)


def check_multi_step(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    multi_step = config.schedule.multi_step
    if multi_step == 1:
        return config
    others = (
        (
            bool(config.speculative.drafts),
            "--speculative-algorithm",
            "drafts are verified step by step",
        ),
        (config.parallel.world > 1, "several ranks", "they agree on every step"),
        (
            config.parallel.uses_dp_attention,
            "--enable-dp-attention",
            "replicas agree on every step",
        ),
        (bool(config.handoff.role), "--disaggregation-mode", "pages are handed over between steps"),
        (
            config.model.is_watched,
            "--forward-hooks or --debug-tensor-dump-*",
            "steps are eager then",
        ),
        (
            bool(config.experts.recorder) or config.experts.balances,
            "--expert-distribution-recorder-mode or --enable-eplb",
            "passes are counted one by one",
        ),
        (model_config.pooling is not None, "a model for vectors", "nothing is decoded"),
    )
    for is_there, what, why in others:
        if is_there and multi_step:
            raise ConfigError(
                f"--num-continuous-decode-steps {multi_step} cannot be combined with {what}: {why}",
                hint="leave one of them out",
            )
        if is_there:
            log.debug("set burst=1 because of %s: %s", what, why)
            return replace(config, schedule=replace(config.schedule, multi_step=1))
    return config
