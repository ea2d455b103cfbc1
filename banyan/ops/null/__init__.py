"""The null device has no kernels of its own: meta tensors go through the reference."""

KERNELS: dict[str, list[str]] = {}
