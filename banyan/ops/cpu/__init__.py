"""Kernels of the CPU, best first; what is not listed runs the plain torch reference."""

KERNELS = {
    "linear": ["linear:onednn"],
    "paged_attention": ["attention:paged_attention"],
}
