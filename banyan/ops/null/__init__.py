"""The null device: meta tensors go through the reference, except where it reads numbers."""

KERNELS = {
    "paged_attention": ["attention:paged_attention"],
}
