"""Hardware: the plain facts of a device and of the links between devices, from which step times
and page counts follow."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from banyan.base.errors import ConfigError
from banyan.base.log import printable


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one device reaches in practice, and how it reaches the others of its replica.

    Attributes:
        memory_gib: of one device (2³⁰ bytes).
        bytes_per_s: read from its memory.
        flops_per_s: multiplications and additions of its matrix units.
        overhead_s: of a step, whatever its size.
        link_bytes_per_s: what one device sends to another while it receives as much.
        link_s: until the first byte of a collective is there, on every one of its hops.
    """

    memory_gib: float
    bytes_per_s: float
    flops_per_s: float
    overhead_s: float = 0.0
    link_bytes_per_s: float = 10e9
    link_s: float = 10e-6

    def all_reduce_s(self, ranks: int, size: float) -> float:
        """A ring's time for `size` bytes (Patarasuk and Yuan, JPDC 69(2), 2009)."""
        return 2 * self.gather_s(ranks, size)

    def gather_s(self, ranks: int, size: float) -> float:
        """A ring's time to gather, or to reduce and scatter, `size` bytes in all."""
        hops = ranks - 1
        return hops * (self.link_s + size / ranks / self.link_bytes_per_s)

    def send_s(self, size: float) -> float:
        return self.link_s + size / self.link_bytes_per_s


_NVLINK_S, _PCIE_S = 1.5e-6, 5e-6
_MEMORY, _MATRIX = 0.8, 0.6
"""Share of the data sheet that a step reaches: read from memory, of the matrix units."""


def _builder(
    memory_gb: float, tb_s: float, tflops: float, link_gb_s: float, link_s: float
) -> Hardware:
    """From a data sheet: decimal gigabytes, dense 16-bit operations, one direction of the link
    between devices of one machine. `link_s` and the overhead of a step are assumptions."""
    return Hardware(
        memory_gib=memory_gb * 1e9 / (1 << 30),
        bytes_per_s=_MEMORY * tb_s * 1e12,
        flops_per_s=_MATRIX * tflops * 1e12,
        overhead_s=100e-6,
        link_bytes_per_s=_MEMORY * link_gb_s * 1e9,
        link_s=link_s,
    )


SHEETS: Mapping[str, Hardware] = {
    "a100-80gb": _builder(80, 2.039, 312, 300, _NVLINK_S),
    "h100-sxm": _builder(80, 3.35, 989, 450, _NVLINK_S),
    "h200-sxm": _builder(141, 4.8, 989, 450, _NVLINK_S),
    "l40s": _builder(48, 0.864, 362, 32, _PCIE_S),
    "l4": _builder(24, 0.3, 121, 32, _PCIE_S),
}
"""Data sheets of nvidia.com (A100 80GB SXM, H100 SXM, H200 SXM, L40S, L4; the last two have PCIe
4.0 x16 and no link of their own)."""


def read_hardware(name: str) -> Hardware:
    """The hardware of a name, or of a JSON file with the fields of `Hardware`.

    Raises:
        ConfigError: neither, or a file with a figure that is missing, unknown or not positive.
    """
    if name in SHEETS:
        return SHEETS[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"there is no hardware {printable(name)!r}",
            hint=f"choose one of: {', '.join(SHEETS)}; or write a JSON file with the fields "
            f"{', '.join(Hardware.__struct_fields__)}",
        )
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Hardware)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{printable(name)!r} is no hardware: {error}") from None
    for field in ("memory_gib", "bytes_per_s", "flops_per_s", "link_bytes_per_s"):
        if not getattr(found, field) > 0:
            raise ConfigError(f"{printable(name)!r}: {field} must be above 0")
    return found
