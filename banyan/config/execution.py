"""Rules about how a model is carried out: windows of the cache, kernels, and what is promised of
them. Part of `config/resolve.py`; knows no kernels and no devices.
"""

import re
from dataclasses import replace

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.env import Environment
from banyan.config.hooks import see_the_layers
from banyan.config.schema import Config
from banyan.model_config.kv_scales import check_kv_scales
from banyan.model_config.model_config import WINDOW, ModelConfig

log = logger(__name__)

TORCH_NATIVE = "torch_native"
TORCH_ATTENTION = "torch_attention:paged_attention"


def lay_out_the_windows(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Three flags say how much layers with a window hold; one of them is enough."""
    cache = config.cache
    if -1 < cache.window_mix < 0:
        raise ConfigError(
            f"--hybrid-kvcache-ratio must be in [0, 1], or -1 for none, got {cache.window_mix:g}"
        )
    given = {
        "--swa-full-tokens-ratio": cache.window_ratio > 0,
        "--hybrid-kvcache-ratio": cache.window_mix >= 0,
        "--disable-hybrid-swa-memory": cache.keeps_windows,
    }
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise ConfigError(
            f"{' and '.join(names)} all say how much layers with a window hold",
            hint="give only one of them",
        )
    if names and WINDOW not in model_config.layer_kinds:
        log.warning("%s has no effect: no layer of this model has a window", names[0])
    return config


def check_the_delimiter(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    given = config.server.score_delimiter
    if given >= model_config.vocab_size:
        raise ConfigError(
            f"--multi-item-scoring-delimiter {given}: the model's tokens are 0 to "
            f"{model_config.vocab_size - 1}"
        )
    return config


def check_the_white_space(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Its form only; a backend that has no patterns leaves JSON to the one that stands in."""
    pattern = config.grammar.whitespace
    if pattern and config.grammar.compact:
        raise ConfigError(
            "--constrained-json-whitespace-pattern and --constrained-json-disable-any-whitespace "
            "say different things about the same white space",
            hint="give only one of them",
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"--constrained-json-whitespace-pattern {printable(repr(pattern), 80)} is no regex: "
            f"{error}"
        ) from None
    return config


def choose_the_attention(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    device = config.device
    if device.attention != TORCH_NATIVE or "paged_attention" in device.kernels:
        return config
    kernels = {**device.kernels, "paged_attention": TORCH_ATTENTION}
    log.info("set kernels=%s because --attention-backend %s", kernels, device.attention)
    return replace(config, device=replace(device, kernels=kernels))


def keep_tokens_apart(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """--enable-deterministic-inference promises that a token depends on its own sequence only."""
    if not config.device.is_deterministic:
        return config
    if config.model.implementation == "transformers":
        raise ConfigError(
            "--enable-deterministic-inference: the sums of --model-impl transformers are its own, "
            "and may depend on how many requests run together",
            hint="leave --model-impl at auto",
        )
    return config


def check_the_offload(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    device = config.device
    if device.offload_gib and device.offload_group > 0:
        raise ConfigError(
            f"--cpu-offload-gb {device.offload_gib:g} and --offload-group-size "
            f"{device.offload_group} both say which layers lie in memory of the host",
            hint="give only one of them",
        )
    if 0 < device.offload_group < device.offload_of_group:
        raise ConfigError(
            f"--offload-num-in-group {device.offload_of_group}: groups have "
            f"{device.offload_group} layers (--offload-group-size)",
            hint=f"give {device.offload_group} or less",
        )
    return config


EXECUTION_RULES = (
    check_the_offload,
    lay_out_the_windows,
    check_kv_scales,
    check_the_delimiter,
    check_the_white_space,
    choose_the_attention,
    keep_tokens_apart,
    see_the_layers,
)
