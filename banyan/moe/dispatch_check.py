"""Checks whether a device supports the requested all-to-all of expert parallelism."""

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.schema import Config
from banyan.lora.adapter_config import EXPERTS
from banyan.model_config.model_config import ModelConfig
from banyan.moe.rules import LIMIT, are_placed, is_fused, sends_rows
from banyan.platform.base import Traits

log = logger(__name__)

_MODE = "--deepep-mode"
_MIB = 1 << 20


def exchanged_tokens(config: Config, traits: Traits) -> int:
    """Most tokens per rank of an all-to-all of fixed size; 0 = it is not used."""
    is_asked = sends_rows(config) and config.experts.a2a_mode != "normal"
    return config.experts.a2a_tokens if is_asked and traits.dispatch is not None else 0


def fused_mode(config: Config) -> int:
    """The operator that does all-to-all and experts at once; 0 = separate operators."""
    return config.experts.fuse_mode if sends_rows(config) and is_fused(config) else 0


def check_fused_dispatch(config: Config, model_config: ModelConfig, traits: Traits) -> None:
    """Raises:
    ConfigError: no operator of this device fuses all-to-all and experts for this model.
    """
    experts, facts = config.experts, model_config.experts
    flag, hint = f"--moe-a2a-backend {experts.a2a} on {traits.name}", "give deepep"
    if experts.fuse_mode > len(traits.fused_dispatch):
        raise ConfigError(f"{flag}: only Ascend A3s have an operator that does so", hint=hint)
    limits = traits.fused_dispatch[experts.fuse_mode - 1]
    assert facts is not None
    width, ranks = facts.latent or model_config.hidden_size, config.parallel.ep
    size = (experts.a2a_tokens, width, 2 * facts.inner, facts.per_token, ranks, facts.count)
    why = _incompatible_feature(config) or limits.obstacle(*size)
    if not why and config.model.activation_dtype != "bfloat16":
        why = f"it computes in bfloat16, --dtype is {config.model.activation_dtype}"
    if not why and (config.device.offload_gib or config.device.offload_group > 0):
        why = "its experts lie in a form of their own, which memory of the host does not keep"
    if why:
        bound = f"; {LIMIT} is {experts.a2a_tokens}"
        raise ConfigError(
            f"{flag}: {why}" + (bound if experts.a2a_tokens > limits.tokens else ""), hint=hint
        )
    needed = limits.buffer_bytes(experts.a2a_tokens, width, facts.per_token, ranks, facts.count)
    message = (
        "rows of %d tokens a rank are sent and computed in one over %d ranks: a buffer of %d MB"
    )
    log.info(message, experts.a2a_tokens, ranks, -(-needed // _MIB))


def check_dispatch(config: Config, model_config: ModelConfig, traits: Traits) -> None:
    """Raises:
    ConfigError: this device, which is not the host, does not support the all-to-all.
    """
    mode = config.experts.a2a_mode
    if is_fused(config):
        return check_fused_dispatch(config, model_config, traits)
    if not traits.shares_steps:
        raise ConfigError(
            f"--moe-a2a-backend {config.experts.a2a}: rows go to the ranks of their experts on "
            f"CPUs and Ascend NPUs only, this is {traits.name}",
            hint="leave it out",
        )
    if mode == "normal":
        return
    if traits.dispatch is None:
        raise ConfigError(
            f"{_MODE} {mode}: {traits.name} has no exchanges of a fixed size",
            hint=f"give {_MODE} normal",
        )
    if why := _obstacle(config, model_config, traits):
        raise ConfigError(f"{_MODE} {mode} on {traits.name}: {why}", hint=f"give {_MODE} normal")


def _obstacle(config: Config, model_config: ModelConfig, traits: Traits) -> str:
    experts, facts, ranks = config.experts, model_config.experts, config.parallel.ep
    assert facts is not None and traits.dispatch is not None
    if why := _incompatible_feature(config):
        return why
    width = facts.latent or model_config.hidden_size
    size = (experts.a2a_tokens, width, facts.per_token, ranks, facts.count)
    if why := traits.dispatch.obstacle(*size):
        bound = f"; {LIMIT} is {experts.a2a_tokens}"
        return why + (bound if experts.a2a_tokens > traits.dispatch.tokens else "")
    needed = -(-traits.dispatch.buffer_bytes(*size) // _MIB)
    message = "rows of %d tokens a rank travel at once over %d ranks, which needs a buffer of %d MB"
    log.info(message, experts.a2a_tokens, ranks, needed)
    return ""


def _incompatible_feature(config: Config) -> str:
    """A feature that is incompatible with an all-to-all of fixed size; "" if there is none."""
    if are_placed(config):
        return "experts that move or have copies are sent by their counts only"
    if EXPERTS in config.lora.kinds:
        return "experts with adapters are sent by their counts only"
    if config.parallel.cp > 1:
        return "the shares of a divided step are not of one size"
    return ""
