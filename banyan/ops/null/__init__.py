"""The null device: meta tensors go through the reference, except where it reads numbers."""

KERNELS = {
    "paged_attention": ["banyan.ops.null.attention:paged_attention"],
}
