"""Rules about steps: chunked prefill, multi-step decoding, attention and offloaded weights."""

from dataclasses import replace

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.devices import facts_of
from banyan.config.env import Environment
from banyan.config.rules.conflicts import reason_for_one_step
from banyan.config.schema import Config, DeviceConfig
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

_TORCH_NATIVE = "torch_native"
_TORCH_ATTENTION = "torch_attention:paged_attention"


def choose_chunk(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    if config.schedule.chunk_tokens != 0:
        return config
    log.debug("set chunked-prefill-size=-1 because 0 means whole prompts")
    return replace(config, schedule=replace(config.schedule, chunk_tokens=-1))


def limit_prefill(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    """Fit the chunk, or a whole unchunked prompt, into one step. Needs the context length."""
    schedule, context = config.schedule, config.model.context_length
    if schedule.chunk_tokens > schedule.prefill_tokens:
        log.info(
            "set chunked-prefill-size=%d because --max-prefill-tokens is less",
            schedule.prefill_tokens,
        )
        return replace(config, schedule=replace(schedule, chunk_tokens=schedule.prefill_tokens))
    if schedule.chunk_tokens == -1 and schedule.prefill_tokens < context:
        log.info("set max-prefill-tokens=%d because prompts are not chunked", context)
        return replace(config, schedule=replace(schedule, prefill_tokens=context))
    return config


def choose_multi_step(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Plan one decode step at a time if a feature excludes more, unless the user set a number."""
    if config.schedule.multi_step:
        return config
    reason = reason_for_one_step(config, model_config)
    if not reason:
        return config
    log.debug("set num-continuous-decode-steps=1 because of %s", reason)
    return replace(config, schedule=replace(config.schedule, multi_step=1))


def _choose_phases(device: DeviceConfig) -> DeviceConfig:
    """The two backends of phases become one, or the phase in which torch attends."""
    prefill = device.prefill_attention or device.attention
    decode = device.decode_attention or device.attention
    uses_torch = [each == _TORCH_NATIVE for each in (prefill, decode)]
    if "paged_attention" in device.kernels:
        return device
    if all(uses_torch):
        return replace(device, attention=_TORCH_NATIVE)
    if not any(uses_torch):
        return device
    phase = "prefill" if uses_torch[0] else "decode"
    log.info("set disable-cuda-graph=True because torch attends in the phase %s", phase)
    others = device.attention if device.attention != _TORCH_NATIVE else "auto"
    return replace(device, attention=others, torch_phase=phase, is_eager=True)


def choose_attention(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    device = _choose_phases(config.device)
    config = replace(config, device=device)
    if device.torch_phase and model_config.latent is not None:
        log.warning(
            "--%s-attention-backend has no effect: one kernel attends over the latent vectors that "
            "this model caches",
            device.torch_phase,
        )
        return replace(config, device=replace(device, torch_phase=""))
    if device.attention != _TORCH_NATIVE or "paged_attention" in device.kernels:
        return config
    kernels = {**device.kernels, "paged_attention": _TORCH_ATTENTION}
    log.info("set kernels=%s because --attention-backend %s", kernels, device.attention)
    return replace(config, device=replace(device, kernels=kernels))


def with_draft_attention(config: Config) -> Config:
    """The config by which the kernels of the draft model are chosen."""
    device, wanted = config.device, config.speculative.draft_attention
    if not wanted:
        return config
    kernels = {op: kernel for op, kernel in device.kernels.items() if kernel != _TORCH_ATTENTION}
    if wanted == _TORCH_NATIVE:
        kernels["paged_attention"] = _TORCH_ATTENTION
    return replace(config, device=replace(device, kernels=kernels, torch_phase=""))


def choose_lora_kernels(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Apply adapters in plain PyTorch if --lora-backend torch_native asks for it."""
    device = config.device
    if config.lora.backend != _TORCH_NATIVE:
        return config
    kernels = {"adapt": "reference", "adapt_rows": "reference", **device.kernels}
    log.info("set kernels=%s because --lora-backend %s", kernels, config.lora.backend)
    return replace(config, device=replace(device, kernels=kernels))


def choose_sampling(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    """Sample in plain PyTorch if --sampling-backend pytorch asks for it."""
    device = config.device
    if device.sampling != "pytorch" or not facts_of(config).torch_sampler:
        return config
    kernels = {"sample": "tensor_sampling:sample", **device.kernels}
    log.info("set kernels=%s because --sampling-backend pytorch", kernels)
    return replace(config, device=replace(device, kernels=kernels))


def check_offload(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    device = config.device
    if 0 < device.offload_group < device.offload_of_group:
        raise ConfigError(
            f"--offload-num-in-group {device.offload_of_group} exceeds --offload-group-size "
            f"{device.offload_group}",
            hint=f"give {device.offload_group} or less",
        )
    return config
