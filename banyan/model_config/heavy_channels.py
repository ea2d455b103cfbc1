"""The channels of --enable-double-sparsity, from the file that --ds-channel-config-path names:

    {"model.layers.0.self_attn.qk_proj": [[17, 3, …], …], …}

Each layer has a list for each head of keys: its channels, the heaviest first.
"""

from dataclasses import replace
from typing import cast

from banyan.base.errors import ConfigError, ModelError
from banyan.base.json_types import is_list
from banyan.base.log import logger
from banyan.config.env import Environment
from banyan.config.schema import Config, SparsityConfig
from banyan.model_config.checkpoint_fields import read_json
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

KINDS = ("qk", "q", "k")
_FLAG, _FILE = "--enable-double-sparsity", "--ds-channel-config-path"
_PLAIN = ("auto", "fp32", "fp16", "bf16")
"""Values of --kv-cache-dtype in which pages hold plain numbers."""


def read_channels(
    sparsity: SparsityConfig, model_config: ModelConfig
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The channels of each layer and head of keys, as many as are asked for.

    Raises:
        ConfigError: the file cannot be read, or is not for this model.
    """
    try:
        fields = read_json(sparsity.path, is_needed=True)
    except ModelError as error:
        raise ConfigError(f"{_FILE}: {error.text}", hint="name a file of channels") from None
    return tuple(
        _of_layer(
            fields, f"model.layers.{layer}.self_attn.{sparsity.kind}_proj", sparsity, model_config
        )
        for layer in range(model_config.num_layers)
    )


def _of_layer(
    fields: dict[str, object], key: str, sparsity: SparsityConfig, model_config: ModelConfig
) -> tuple[tuple[int, ...], ...]:
    heads, width, count = model_config.num_kv_heads, model_config.head_dim, sparsity.channels
    lists = fields.get(key)
    if not is_list(lists) or len(lists) != heads:
        found = f"{len(lists)} lists" if is_list(lists) else "no list"
        raise ConfigError(
            f"{_FILE}: {key} has {found}; the model has {heads} heads of keys",
            hint="name a file that was made for this model and --ds-heavy-channel-type",
        )
    channels: list[tuple[int, ...]] = []
    for each in lists:
        first = each[:count] if is_list(each) else []
        is_good = all(isinstance(n, int) and 0 <= n < width for n in first)
        if len(first) < count or not is_good:
            raise ConfigError(
                f"{_FILE}: {key} has a head without {count} channels from 0 to {width - 1}",
                hint=f"give --ds-heavy-channel-num {width} or less, and a file of this model",
            )
        channels.append(tuple(cast(list[int], first)))
    return tuple(channels)


def check_sparsity(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    """Check the file before weights are loaded, and run steps eagerly."""
    sparsity = config.sparsity
    if not sparsity.is_enabled:
        return config
    if not sparsity.path:
        raise ConfigError(f"{_FLAG} needs {_FILE}", hint="name the file of the model's channels")
    if model_config.latent is not None:
        raise ConfigError(
            f"{_FLAG}: this model caches latent vectors, which have no channels of heads",
            hint="leave it out",
        )
    if config.cache.dtype not in _PLAIN:
        raise ConfigError(
            f"{_FLAG} reads channels of keys, and --kv-cache-dtype {config.cache.dtype} packs them",
            hint=f"choose {', '.join(_PLAIN)}",
        )
    read_channels(sparsity, model_config)
    log.info("set disable-cuda-graph=True because torch chooses tokens for %s", _FLAG)
    return replace(config, device=replace(config.device, is_eager=True))
