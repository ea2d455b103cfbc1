"""Kernels of the CPU, best first; what is not listed runs the plain torch reference."""

KERNELS = {
    "linear": ["linear:dense"],
    "paged_attention": ["attention:paged_attention"],
}
