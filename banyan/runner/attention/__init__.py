"""The attention backends, by name."""

from banyan.base.table import Table
from banyan.runner.attention.base import AttentionBackend

BACKENDS: Table[type[AttentionBackend]] = Table(
    "attention backend",
    {
        "reference": "banyan.runner.attention.reference:ReferenceAttention",
        "encoder": "banyan.runner.attention.encoder:EncoderAttention",
    },
    plugins="banyan.attention",
)
