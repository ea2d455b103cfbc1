"""Kernels of Ascend NPUs, best first. An op that is not listed runs the plain torch reference,
whose ops the device has kernels for.
"""

_HERE = "banyan.ascend.ops"
_LATENT = f"{_HERE}.latent_attention"
_ROWS = ("rms_norm", "add_rms_norm", "rotary", "silu_and_mul")
KERNELS = {
    "write_kv": [f"{_HERE}.paged_attention:write_kv"],
    "paged_attention": [
        f"{_HERE}.paged_attention:paged_attention",
        "banyan.ops.torch_attention:paged_attention",
    ],
    "write_latent": [
        f"{_LATENT}:write_fractal",
        f"{_LATENT}:write_latent",
    ],
    "latent_attention": [
        f"{_LATENT}:attend_fractal",
        f"{_LATENT}:latent_attention",
    ],
    "choose_positions": [f"{_LATENT}:choose_positions"],
    "experts": [f"{_HERE}.experts:experts"],
    "combine_experts": [f"{_HERE}.experts:combine_experts"],
    "linear": [f"{_HERE}.products:linear_kernel"],
    **{op: [f"{_HERE}.rows:{op}"] for op in _ROWS},
}
