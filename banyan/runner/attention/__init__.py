"""The attention backends, by name."""

from banyan.base.table import Table
from banyan.runner.attention.base import AttentionBackend

BACKENDS: Table[type[AttentionBackend]] = Table(
    "attention backend",
    {"reference": "banyan.runner.attention.reference:ReferenceAttention"},
    plugins="banyan.attention",
)
