"""What a device suggests where the flags left something open, and how a Config takes it.

The engine learns its device when it opens it, so these are filled in there; the API process gets
them with its first message. Until then 0, UNSAID and "auto" stand for "the
device's own".
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from banyan.base.errors import ConfigError
from banyan.base.json_types import is_list
from banyan.base.log import logger
from banyan.config.schema import UNSAID, Config
from banyan.lora.rules import MOST_LOADED
from banyan.moe.rules import within_the_exchange

log = logger(__name__)

AUTO = "auto"
_PROMPT_SHAPES = (
    *range(16, 129, 16),
    *range(160, 513, 32),
    *range(576, 1025, 64),
    *range(1280, 4097, 256),
)
"""Tokens of the steps with prompts that are captured: less than a quarter of one is padding."""


@dataclass(frozen=True)
class Defaults:
    """
    Attributes:
        device: its name.
        dtypes: number types that activations may have, the one to take first.
        page_size: tokens per cache page.
        chunk_tokens: prompt tokens per step.
        running_cap: requests that run at once, when the cache has room for more.
        free_share: share of the free memory that the cache takes.
        loaded_adapters: in memory at most; 0 = as many as run at once, where there is room for each
            from the start on.
        shapes: rows of the steps to capture, rising; () where steps are not captured by shape.
        captures_prompts: steps with prompts can be captured too.
        is_sized: the sizes that are named bound which decode steps are recorded.
        burst: decode steps that one plan may hold.
    """

    device: str
    dtypes: tuple[str, ...]
    page_size: int
    chunk_tokens: int
    running_cap: int
    free_share: float
    loaded_adapters: int = MOST_LOADED
    shapes: tuple[int, ...] = ()
    captures_prompts: bool = False
    is_sized: bool = False
    multi_step: int = 1


def settle(config: Config, defaults: Defaults) -> tuple[Config, dict[str, str]]:
    """`config` with nothing left open, and the origin of each field that the device has set.

    Raises:
        ConfigError: a number type that activations cannot have on this device.
    """
    _check_dtype(config.model.activation_dtype, defaults)
    chunk = min(defaults.chunk_tokens, config.schedule.prefill_tokens)
    chunk, running = within_the_exchange(config, chunk, defaults.running_cap)
    found: dict[str, object] = {
        "device.name": defaults.device,
        "model.activation_dtype": defaults.dtypes[0],
        "cache.page_size": defaults.page_size,
        "cache.free_share": defaults.free_share,
        "schedule.chunk_tokens": chunk,
        "schedule.running_cap": running,
        "schedule.multi_step": defaults.multi_step,
    }
    if config.lora.is_enabled:
        most = max(config.lora.max_running, len(config.lora.paths))
        found["lora.max_loaded"] = defaults.loaded_adapters or most
    is_open = {
        name: value for name, value in found.items() if _value(config, name) in (0, AUTO, UNSAID)
    }
    device = config.device
    is_named = bool(device.shapes or device.largest_shape)
    if defaults.shapes or defaults.is_sized and is_named:
        is_open["device.shapes"] = _shapes(config, defaults)
    elif is_named or device.is_unpadded:
        log.warning(
            "steps on %s are not captured by shape: --cuda-graph-bs, --cuda-graph-max-bs and "
            "--disable-cuda-graph-padding have no effect",
            defaults.device,
        )
    can_capture = device.captures_prompts and defaults.captures_prompts
    is_open["device.prompt_shapes"] = _prompt_shapes(config) if can_capture else ()
    for name, value in is_open.items():
        log.debug("set %s=%s because that suits %s", name.split(".")[1], value, defaults.device)
    origins = dict.fromkeys(is_open, f"device {defaults.device}")
    return with_settings(config, is_open), origins


def settings_of(config: Config, names: Mapping[str, str]) -> dict[str, object]:
    """The values of some fields, "part.field" each."""
    return {name: _value(config, name) for name in names}


def with_settings(config: Config, settings: Mapping[str, object]) -> Config:
    """`config` with some fields changed, "part.field" each."""
    for name, value in settings.items():
        part, _, field = name.partition(".")
        kept = tuple(value) if is_list(value) else value
        config = replace(config, **{part: replace(getattr(config, part), **{field: kept})})
    return config


def _value(config: Config, name: str) -> object:
    part, _, field = name.partition(".")
    return getattr(getattr(config, part), field)


def _check_dtype(dtype: str, defaults: Defaults) -> None:
    if dtype not in (AUTO, *defaults.dtypes):
        raise ConfigError(
            f"--dtype {dtype}: no kernel of {defaults.device} computes on such activations",
            hint=f"choose: {', '.join((AUTO, *defaults.dtypes))}",
        )


def _prompt_shapes(config: Config) -> tuple[int, ...]:
    """Tokens of the steps with prompts to capture, rising."""
    device = config.device
    named = device.prompt_shapes or _PROMPT_SHAPES
    return tuple(sorted({tokens for tokens in named if tokens <= device.largest_prompt_shape}))


def _shapes(config: Config, defaults: Defaults) -> tuple[int, ...]:
    """Rows of the steps to capture: those that are named, or the device's up to a bound."""
    device = config.device
    most = device.largest_shape or max(device.shapes or defaults.shapes)
    named = device.shapes or (*defaults.shapes, most)
    return tuple(sorted({rows for rows in named if rows <= most})) or (most,)
