"""Attention in torch, row by row: slow; chosen only by name."""

from banyan.ops import reference
from banyan.ops.bind import Kernel

paged_attention = Kernel(supports=lambda spec: None, run=reference.paged_attention, waits=True)
