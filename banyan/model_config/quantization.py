"""Quantization of weights and of the KV cache, as checkpoints and flags name it.

`models/weights/quant` reads the tensors of each method. The FP8 scales of the KV cache come from
the file that --quantization-param-path names:

    {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn",
     "scaling_factor": {"0": {"0": 0.023, "1": 0.018, …}}}}

The keys of scaling_factor are rank and layer. Keys and values are divided by the scale before they
become FP8.
"""

from types import MappingProxyType

from banyan.base.errors import ConfigError, ModelError
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.checkpoint_fields import CheckpointFields, read_json
from banyan.model_config.model_config import ModelConfig

SPELLINGS = MappingProxyType(
    {
        "fp8": ("fp8", "mxfp8", "w8a8_fp8"),
        "w4afp8": ("w4afp8",),
        "gptq": ("gptq", "gptq_marlin", "moe_wna16"),
        "awq": ("awq", "awq_marlin", "moe_wna16"),
        "compressed-tensors": ("compressed-tensors", "w8a8_int8", "w8a8_fp8", "auto-round-int8"),
        "w8a8_int8": ("w8a8_int8",),
        "modelslim": ("modelslim", "w8a8_int8"),
        "bitsandbytes": ("bitsandbytes",),
        "mxfp4": ("mxfp4",),
        "modelopt": ("modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mixed", "petit_nvfp4"),
        "auto-round": ("auto-round",),
        "quark": ("quark",),
    }
)
"""Method -> names that --quantization accepts for it. A checkpoint may use these names too: a
method's own name wins, then the first method with this name."""
_OLDER = MappingProxyType(
    {"intel/auto-round": "auto-round", "compressed_tensors": "compressed-tensors"}
)
"""Names in older checkpoints -> method."""
FLOAT_FORMS = ("fp8", "bitsandbytes", "modelopt")
"""Methods with float weights, which --quantization may quantize again."""


def form_of(name: str) -> str:
    """The method for a checkpoint's name of it; an unknown name is returned unchanged."""
    if name in SPELLINGS:
        return name
    found = (form for form, names in SPELLINGS.items() if name in names)
    return next(found, _OLDER.get(name, name))


def spellings() -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in SPELLINGS.values() for name in names))


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
