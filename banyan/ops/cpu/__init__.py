"""CPU kernels, best first. Ops without a kernel here run the plain torch reference."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from banyan.base.errors import ConfigError
from banyan.base.log import logger

if TYPE_CHECKING:
    from banyan.ops.bind import Toolkit

_ROWS = (
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "add",
    "rotary_angles",
    "rotary",
    "silu_and_mul",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gelu_tanh",
    "concat",
    "sigmoid_scale",
    "scale_logits",
    "select_rows",
    "take_rows",
    "spread_columns",
)
_STATES = ("apply_gate", "short_conv", "decay_gates", "scan", "selective_scan")
_HERE = "banyan.ops.cpu"
KERNELS = {
    "linear": [
        f"{_HERE}.linear:rounded",
        f"{_HERE}.linear:plain",
        f"{_HERE}.linear:onednn",
    ],
    "embedding": [f"{_HERE}.linear:embedding"],
    "route": [f"{_HERE}.experts:route"],
    "place_experts": [f"{_HERE}.experts:place"],
    "combine_experts": [f"{_HERE}.experts:combine"],
    "experts": [f"{_HERE}.experts:rounded", f"{_HERE}.experts:plain"],
    "head_linear": [f"{_HERE}.latent_attention:rounded", f"{_HERE}.latent_attention:plain"],
    "write_latent": [f"{_HERE}.latent_attention:write_latent"],
    "latent_attention": [f"{_HERE}.latent_attention:latent_attention"],
    "choose_positions": [f"{_HERE}.latent_attention:choose_positions"],
    "write_kv": [f"{_HERE}.paged_attention:write_kv"],
    "move_kv": [f"{_HERE}.paged_attention:moved"],
    "paged_attention": [
        f"{_HERE}.paged_attention:rounded",
        f"{_HERE}.paged_attention:paged_attention",
        f"{_HERE}.torch_attention:paged_attention",
    ],
    "adapt": [f"{_HERE}.lora:adapt"],
    "adapt_rows": [f"{_HERE}.lora:adapt_rows"],
    "sample": [f"{_HERE}.sampling:sample", "banyan.ops.tensor_sampling:sample"],
    "logprobs": [f"{_HERE}.sampling:logprobs"],
    **{op: [f"{_HERE}.rows:{op}"] for op in _ROWS},
    **{op: [f"{_HERE}.state:{op}"] for op in _STATES},
}

_log = logger(__name__)


def open_toolkit(threads: int, wishes: Mapping[str, str]) -> "Toolkit":
    """Open the compiled library, building it on first use; a text says why there is none.

    Args:
        wishes: "cpu-compiler", the C++ compiler to try first; "cpu-isa", the highest instruction
            set to use; "quantization", the type that float projections are rounded to at load.

    Raises:
        ConfigError: the rounding is unknown, or has no kernels here.
    """
    from banyan.ops.bind import NoToolkit
    from banyan.ops.cpu.build import BuildError, usable_isa
    from banyan.ops.cpu.library import open_library
    from banyan.ops.cpu.weights import QUANTIZATIONS

    wanted = wishes.get("quantization", "")
    if wanted and wanted not in QUANTIZATIONS:
        raise ConfigError(
            f"--quantization {wanted} does not exist on cpu",
            hint=f"choose: {', '.join(QUANTIZATIONS)}",
        )
    try:
        isa = usable_isa(wishes.get("cpu-isa", ""))
        library = open_library(isa, threads, wishes.get("cpu-compiler", ""), wanted)
    except BuildError as error:
        if wanted:
            raise ConfigError(
                f"--quantization {wanted} needs the compiled CPU kernels: {error}"
            ) from None
        _log.warning("no compiled CPU kernels, plain torch serves: %s", error)
        return NoToolkit(f"not compiled: {error}")
    _log.info("compiled CPU kernels: %s, %d threads", library.isa, library.threads)
    return library
