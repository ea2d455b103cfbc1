"""The attention backends, by name."""

from collections.abc import Callable

from banyan.base.table import Table
from banyan.ops.api import Ops
from banyan.runner.attention.base import AttentionBackend
from banyan.runner.kvstore import KVStore

BACKENDS: Table[Callable[[Ops, KVStore], AttentionBackend]] = Table(
    "attention backend",
    {
        "paged": "banyan.runner.attention.paged:PagedAttentionBackend",
        # An alias: the old name of "paged".
        "reference": "banyan.runner.attention.paged:PagedAttentionBackend",
        "encoder": "banyan.runner.attention.encoder:EncoderAttention",
    },
    plugins="banyan.attention",
)
