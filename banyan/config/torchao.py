"""What --torchao-config may be called; `models/weights/torchao.py` knows what it means."""

from banyan.base.errors import ConfigError
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig

TORCHAO_NAMES = (
    *("int8wo", "int8dq", "fp8wo", "fp8dq-per_row", "fp8dq-per_tensor"),
    *("int4wo-32", "int4wo-64", "int4wo-128", "int4wo-256"),
)


def check_the_torchao(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """
    Raises:
        ConfigError: something else decides how weights are kept, or they are no floats.
    """
    model = config.model
    if not model.torchao:
        return config
    flag = f"--torchao-config {model.torchao}"
    if model.quantization:
        raise ConfigError(
            f"{flag} and --quantization {model.quantization} both say what weights are rounded to",
            hint="give one of them",
        )
    if model.implementation == "transformers" or model.load_format == "dummy":
        is_dummy = model.load_format == "dummy"
        other = "--load-format dummy" if is_dummy else "--model-impl transformers"
        raise ConfigError(
            f"{flag} rounds what is read from a checkpoint's files, which {other} does not do here",
            hint="leave one of them out",
        )
    if model_config.quant is not None or not model_config.stores_floats:
        is_now = model_config.dtype if model_config.quant is None else model_config.quant.method
        raise ConfigError(
            f"{flag}: the weights of {model.source!r} are {is_now} already, only float weights are "
            "rounded",
            hint="leave the flag out, or name a checkpoint of float weights",
        )
    return config
