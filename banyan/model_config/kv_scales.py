"""FP8 KV cache scales, from the file that --quantization-param-path names:

    {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn",
     "scaling_factor": {"0": {"0": 0.023, "1": 0.018, …}}}}

The keys of scaling_factor are rank and layer. Keys and values are divided by the scale before they
become FP8.
"""

from banyan.base.errors import ConfigError, ModelError
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.checkpoint_fields import CheckpointFields, read_json
from banyan.model_config.model_config import ModelConfig

FLOAT8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Values of --kv-cache-dtype -> names in the file."""
_FLAG = "--quantization-param-path"
_LEAST, _MOST = 1e-9, 1e9


def read_kv_scales(config: Config, model_config: ModelConfig, rank: int) -> tuple[float, ...]:
    """The scale of each layer, for one attention rank; () without a file.

    Raises:
        ConfigError: the file cannot be read, or is not for this model, dtype or rank.
    """
    path, dtype = config.cache.scales, config.cache.dtype
    if not path or dtype not in FLOAT8:
        return ()
    try:
        fields = CheckpointFields(read_json(path, is_needed=True), path)
        kept = fields.part("kv_cache")
        if kept is None:
            raise fields.error("kv_cache", None, "a mapping")
        if fields.text("model_type", default=model_config.model_type) != model_config.model_type:
            raise fields.error("model_type", fields.any("model_type"), model_config.model_type)
        if kept.text("dtype") != FLOAT8[dtype]:
            raise kept.error("dtype", kept.any("dtype"), f"{FLOAT8[dtype]}, as --kv-cache-dtype is")
        by_rank = kept.part("scaling_factor")
        of_rank = None if by_rank is None else by_rank.part(str(rank))
        if of_rank is None:
            raise kept.error("scaling_factor", None, f"a mapping that has rank {rank}")
        return tuple(of_rank.number(str(i), _LEAST, _MOST) for i in range(model_config.num_layers))
    except ModelError as error:
        raise ConfigError(
            f"{_FLAG}: {error.text}", hint="name a file that was made for this model and --tp"
        ) from None


def check_kv_scales(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    """Check the file before weights are loaded."""
    if not config.cache.scales or config.cache.dtype not in FLOAT8:
        return config
    is_foreign = config.model.implementation == "transformers"
    if model_config.latent is not None or is_foreign:
        why = "--model-impl transformers" if is_foreign else "latent attention"
        raise ConfigError(
            f"{_FLAG}: {why} keeps no keys and values in units of a scale",
            hint="leave it out; 1 is taken",
        )
    for rank in range(config.parallel.attention_ranks):
        read_kv_scales(config, model_config, rank)
    return config
