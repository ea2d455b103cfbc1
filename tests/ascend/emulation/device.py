"""The emulated NPU as Python sees it: what `import torch_npu` would give, as far as it is used.

A process has one kind of such device and keeps it until it ends.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType, SimpleNamespace

import torch

from tests.ascend.emulation import build, graph, groups, operators

MEMORY_BYTES = (64 << 30) // groups.SCALE
"""Of each device at first: `set_memory` changes it."""


@dataclass(frozen=True)
class Soc:
    """A chip, as the driver names it, and the devices of a machine."""

    device_name: str
    devices: int


SOCS = {"A2": Soc("Ascend910B3", 8), "A3": Soc("Ascend910_9382", 16)}


class EmulatedNpu:
    """The device of this process, and what tests may ask of it."""

    def __init__(self, core: ModuleType, soc: Soc) -> None:
        self.core = core
        self.soc = soc
        self.group_options = groups.Options

    def counters(self) -> dict[str, int]:
        """to_host: copies to the host, of which to_host_late are not waited for; to_device; waits:
        the host has waited for the device; operators of torch that ran."""
        return self.core.counters()

    def watch_races(self, is_on: bool) -> None:
        """Begin to look, anew, whether work on several streams is ordered; or stop."""
        self.core.watch_races(is_on)

    def races(self) -> list[str]:
        """Work that used the same memory as other work and did not wait for it."""
        return self.core.races()

    def set_memory(self, size_bytes: int, device: int = 0) -> None:
        self.core.set_limit(device, size_bytes)


@cache
def install(soc: str) -> EmulatedNpu:
    """Make torch know the device; a second chip in one process is refused.

    Raises:
        ValueError: there is no such chip.
        RuntimeError: the device is another one already, or cannot be built.
    """
    if soc not in SOCS:
        raise ValueError(f"no chip is called {soc!r}: {', '.join(SOCS)}")
    if torch._C._get_privateuse1_backend_name() != "privateuseone":
        raise RuntimeError("this process has a device of its own already; it can have one")
    if why := build.absence():
        raise RuntimeError(why)
    core = build.load()
    torch.utils.rename_privateuse1_backend("npu")
    npu = EmulatedNpu(core, SOCS[soc])
    core.set_device_count(npu.soc.devices)
    for device in range(npu.soc.devices):
        core.set_limit(device, MEMORY_BYTES)
    torch._register_device_module("npu", _surface(npu))
    exchanges = groups.Exchanges(core)
    operators.register(core, exchanges, npu.soc.device_name)
    exchanges.register()
    return npu


def _surface(npu: EmulatedNpu) -> ModuleType:
    """`torch.npu`."""
    core = npu.core
    surface = ModuleType("torch.npu")
    offered = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,  # no operator here draws random numbers
        "device_count": core.device_count,
        "current_device": core.current_device,
        "set_device": lambda device: core.set_device(_index(core, device)),
        "get_device_name": lambda device=None: npu.soc.device_name,
        "mem_get_info": lambda device=None: _memory(core, _index(core, device)),
        "memory_reserved": lambda device=None: core.used_bytes(_index(core, device)),
        "empty_cache": lambda: None,  # nothing is kept that was freed
        "get_device_properties": lambda device=None: SimpleNamespace(
            name=npu.soc.device_name, total_memory=core.limit_bytes(_index(core, device))
        ),
        "config": SimpleNamespace(allow_internal_format=False),
        "set_compile_mode": lambda jit_compile: None,
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(core, device)),
        "Stream": lambda device=None: torch.Stream(torch.device("npu", _index(core, device))),
        "current_stream": lambda device=None: torch.accelerator.current_stream(device),
        "Event": lambda: torch.Event("npu"),
        "stream": _stream,
        "NPUGraph": lambda: graph.Graph(core),
        "graph": graph.capture,
    }
    surface.__dict__.update(offered)
    return surface


def _index(core: ModuleType, device: int | str | torch.device | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return core.current_device() if index is None else index


def _memory(core: ModuleType, device: int) -> tuple[int, int]:
    limit = core.limit_bytes(device)
    return limit - core.used_bytes(device), limit


@contextlib.contextmanager
def _stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield
