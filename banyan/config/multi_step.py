"""What several decode steps in one plan do not go with. Part of `config/resolve.py`.

Where the flags leave their number open there is one step beside what they do not go with.
"""

from dataclasses import replace

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.model_config import ModelCard

log = logger(__name__)


def check_the_bursts(config: Config, card: ModelCard, environment: Environment) -> Config:
    burst = config.schedule.burst
    if burst == 1:
        return config
    others = (
        (
            bool(config.speculative.drafts),
            "--speculative-algorithm",
            "drafts are verified step by step",
        ),
        (config.parallel.world > 1, "several ranks", "they agree on every step"),
        (config.parallel.is_joined, "--enable-dp-attention", "replicas agree on every step"),
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
        (card.pooling is not None, "a model for vectors", "nothing is decoded"),
    )
    for is_there, what, why in others:
        if is_there and burst:
            raise ConfigError(
                f"--num-continuous-decode-steps {burst} and {what} do not go together: {why}",
                hint="leave one of them out",
            )
        if is_there:
            log.debug("set burst=1 because of %s: %s", what, why)
            return replace(config, schedule=replace(config.schedule, burst=1))
    return config
