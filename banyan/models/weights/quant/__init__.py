"""Formats of quantised checkpoints, by the `quant_method` of their configuration."""

import json

from banyan.base.table import Table
from banyan.config.card import QuantFacts
from banyan.config.facts import Facts
from banyan.models.weights.quant.base import OpenMethod, QuantMethod

QUANT_METHODS: Table[OpenMethod] = Table(
    "quantization of a checkpoint",
    {
        "fp8": "banyan.models.weights.quant.fp8:open_fp8",
    },
    plugins="banyan.quantizations",
)


def open_method(quant: QuantFacts, where: str) -> QuantMethod:
    """The method of a checkpoint; ConfigError when its name is unknown, ModelError when a setting
    is not served."""
    opened = QUANT_METHODS.load(quant.method)
    return opened(Facts(json.loads(quant.settings), f"{where}, quantization_config"))
