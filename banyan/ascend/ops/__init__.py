"""Kernels of Ascend NPUs, best first; what is not listed runs the plain torch reference, whose ops
the device has kernels for."""

from collections.abc import Mapping

from banyan.base.errors import ConfigError
from banyan.ops.bind import Toolkit

_HERE = "banyan.ascend.ops"
_ROWS = ("rms_norm", "add_rms_norm", "rotary", "silu_and_mul")
KERNELS = {
    "write_kv": [f"{_HERE}.pages:write_kv"],
    "paged_attention": [f"{_HERE}.pages:paged_attention"],
    "write_latent": [f"{_HERE}.latents:write_fractal", f"{_HERE}.latents:write_latent"],
    "latent_attention": [f"{_HERE}.latents:attend_fractal", f"{_HERE}.latents:latent_attention"],
    "choose_positions": [f"{_HERE}.sparse:choose_positions"],
    "experts": [f"{_HERE}.experts:experts"],
    "linear": [f"{_HERE}.quantised:linear_kernel"],
    **{op: [f"{_HERE}.rows:{op}"] for op in _ROWS},
}


def open_toolkit(threads: int, wishes: Mapping[str, str]) -> Toolkit:
    """
    Args:
        wishes: "offload", that weights lie so that copies of their bytes are weights too;
            "fuseep-mode", the operator that sends rows to experts and runs these (1 or 2).

    Raises:
        ConfigError: another wish, of which none exists here.
    """
    from banyan.ascend.driver import open_deep_ep, open_driver
    from banyan.ascend.ops.fused_operators import Fuser
    from banyan.ascend.ops.needs import NpuToolkit
    from banyan.ascend.ops.operators import Operators
    from banyan.platform.dispatch import dispatch_of, fusing_of

    wishes = dict(wishes)
    keeps_plain = bool(wishes.pop("offload", ""))
    mode = int(wishes.pop("fuseep-mode", 0))
    for flag, value in wishes.items():
        raise ConfigError(f"--{flag} {value} does not exist on npu", hint="leave it out")
    driver = open_driver()
    chip = driver.npu.get_device_name()
    operators = Operators(driver.is_checked, keeps_plain=keeps_plain)
    fuser = None
    if mode:
        fuser = Fuser(open_deep_ep(), mode, fusing_of(chip)[mode - 1], driver.is_checked)
    forms = (driver.fuses_latents, driver.fractal_pages)
    return NpuToolkit(operators, dispatch_of(chip), "", None, *forms, fuser)
