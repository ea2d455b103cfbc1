"""Kernels of the CPU, best first; what is not listed runs the plain torch reference."""

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.ops.bind import ToolkitOptions

_ROWS = (
    *("rms_norm", "add_rms_norm", "layer_norm", "add", "rotary_angles", "rotary"),
    *("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "gelu_tanh", "concat"),
    *("scale_logits", "select_rows"),
)
KERNELS = {
    "linear": ["linear:rounded", "linear:plain", "linear_onednn:onednn"],
    "embedding": ["embedding:stored"],
    "write_kv": ["paged_attention:write_kv"],
    "paged_attention": ["paged_attention:paged_attention", "torch_attention:paged_attention"],
    "sample": ["sampling:sample"],
    "logprobs": ["sampling:logprobs"],
    **{op: [f"rows:{op}"] for op in _ROWS},
}

_log = logger(__name__)


def open_toolkit(options: ToolkitOptions) -> object:
    """The compiled library, built when this is the first time; or why there is none."""
    from banyan.ops.cpu.build import BuildError, cached_library
    from banyan.ops.cpu.library import Library
    from banyan.ops.cpu.weights import QUANTIZATIONS

    wanted = options.quantization
    if wanted and wanted not in QUANTIZATIONS:
        raise ConfigError(
            f"--quantization {wanted} does not exist on cpu",
            hint=f"choose: {', '.join(QUANTIZATIONS)}",
        )
    try:
        path = cached_library(options.compiler)
    except BuildError as error:
        if wanted:
            raise ConfigError(
                f"--quantization {wanted} needs the compiled CPU kernels: {error}"
            ) from None
        _log.warning("no compiled CPU kernels, plain torch serves: %s", error)
        return f"not compiled: {error}"
    library = Library(path, options.threads, options.isa, quantization=wanted)
    for line in library.settle():
        _log.warning("%s", line)
    _log.info("compiled CPU kernels: %s, %d threads", library.isa, library.threads)
    return library
