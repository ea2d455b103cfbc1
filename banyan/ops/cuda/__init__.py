"""CUDA kernels, best first. Ops without a kernel here run the plain torch reference.

For projections the reference is the vendor's library; weights without a kernel for their type are
unpacked to the activation type."""

from collections.abc import Mapping

from banyan.base.errors import ConfigError
from banyan.ops.bind import Toolkit

_HERE = "banyan.ops.cuda"
_ROWS = ("rms_norm", "add_rms_norm", "rotary", "norm_rotary", "silu_and_mul")
_STATES = ("apply_gate", "decay_gates", "short_conv", "scan", "selective_scan")
KERNELS = {
    "write_kv": [f"{_HERE}.triton_attention:write_kv"],
    "paged_attention": [
        f"{_HERE}.triton_attention:paged_attention",
        "banyan.ops.torch_attention:paged_attention",
    ],
    "write_latent": [f"{_HERE}.triton_latent:write_latent"],
    "latent_attention": [f"{_HERE}.triton_latent:latent_attention"],
    "choose_positions": [f"{_HERE}.triton_latent:choose_positions"],
    "head_linear": [f"{_HERE}.products:head_linear"],
    "experts": [f"{_HERE}.triton_experts:experts"],
    "combine_experts": [f"{_HERE}.triton_experts:combine_experts"],
    "linear": [
        f"{_HERE}.fp8:rounding_linear",
        f"{_HERE}.fp8:linear",
        f"{_HERE}.products:linear",
    ],
    "adapt": [f"{_HERE}.triton_lora:adapt"],
    "sample": [f"{_HERE}.triton_sampling:sample", "banyan.ops.tensor_sampling:sample"],
    "logprobs": ["banyan.ops.tensor_sampling:logprobs"],
    **{op: [f"{_HERE}.triton_rows:{op}"] for op in _ROWS},
    **{op: [f"{_HERE}.triton_state:{op}"] for op in _STATES},
}


def open_toolkit(threads: int, wishes: Mapping[str, str]) -> Toolkit:
    """
    Args:
        wishes: "quantization", the type that float projections are rounded to at load;
            "fp8-gemm-backend", what multiplies 8-bit floats.

    Raises:
        ConfigError: the wish or the rounding is unknown, or the rounding's kernels are missing.
    """
    from banyan.ops.cuda.needs import FP8, FP8_BACKENDS, QUANTIZATIONS, CudaToolkit, has_triton

    wanted = wishes.get("quantization", "")
    types = (*QUANTIZATIONS, FP8)
    known = {"quantization": types, "fp8-gemm-backend": FP8_BACKENDS}
    for flag, value in wishes.items():
        if value not in known.get(flag, ()):
            raise ConfigError(
                f"--{flag} {value} does not exist on cuda",
                hint=f"leave it out; --quantization may be {', '.join(types)}",
            )
    if wanted and not has_triton():
        raise ConfigError(
            f"--quantization {wanted} needs the package triton, which is not installed",
            hint="install triton, or leave the flag out",
        )
    return CudaToolkit(quantization=wanted, fp8_backend=wishes.get("fp8-gemm-backend", ""))
