"""Kernels of CUDA devices, best first; what is not listed runs the plain torch reference, which for
projections is the vendor's library, on weights unpacked to the activation type where no kernel
keeps their numbers."""

_HERE = "banyan.ops.cuda"
_ROWS = ("rms_norm", "add_rms_norm", "rotary", "silu_and_mul")
KERNELS = {
    "write_kv": [f"{_HERE}.triton_attention:write_kv"],
    "paged_attention": [
        f"{_HERE}.triton_attention:paged_attention",
        f"{_HERE}.torch_attention:paged_attention",
    ],
    "write_latent": [f"{_HERE}.triton_latent:write_latent"],
    "latent_attention": [f"{_HERE}.triton_latent:latent_attention"],
    "head_linear": [f"{_HERE}.head_linear:head_linear"],
    "experts": [f"{_HERE}.triton_experts:experts"],
    "combine_experts": [f"{_HERE}.triton_experts:combine_experts"],
    "linear": [f"{_HERE}.products:linear"],
    "sample": [f"{_HERE}.triton_sampling:sample", "banyan.ops.tensor_sampling:sample"],
    "logprobs": ["banyan.ops.tensor_sampling:logprobs"],
    **{op: [f"{_HERE}.triton_rows:{op}"] for op in _ROWS},
}
