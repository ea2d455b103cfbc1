"""Attention in torch, row by row: slow, and told apart from the others by its name alone."""

from banyan.ops import reference
from banyan.ops.bind import Kernel

paged_attention = Kernel(supports=lambda spec: None, run=reference.paged_attention, waits=True)
