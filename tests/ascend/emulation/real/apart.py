"""The meta kernels of a torch_npu whose libraries this torch cannot load: they are Python, and are
run here over the operators that its package declares. What they ask of the rest is answered below,
as by an A3 without a CANN."""

import importlib.util
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType

import torch

_KERNELS = "torch_npu/op_plugin/meta/_meta_registrations.py"
_A3 = 253
"""An Ascend910_9382, as torch_npu numbers it."""
_TYPES = {
    **{"int4": 285, "hifloat8": 290, "float8_e5m2": 291, "float8_e4m3fn": 292},
    **{"float8_e8m0fnu": 293, "float4_e2m1fn_x2": 296, "float4_e1m2fn_x2": 297},
}
"""Number types that torch has not, as torch_npu numbers them."""


class _Wrong(Enum):
    """Kinds of errors, by which sentences end."""

    PARAM = "param"
    TYPE = "type"
    VALUE = "value"
    NOT_SUPPORT = "not supported"


def register(packages: Path, declared: list[str]) -> torch.library.Library:
    """Define the operators and their meta kernels; they last as long as what is returned.

    Args:
        declared: schemas of the operators.
    """
    library = torch.library.Library("npu", "DEF")
    for line in declared:
        space, _, rest = line.partition("::")
        if space == "npu":
            library.define(rest)
    _stand_in("torch_npu", **_TYPES)
    _stand_in("torch_npu.utils")
    _stand_in("torch_npu.utils._error_code", ErrCode=_Wrong, ops_error=str)
    _stand_in("torch_npu.npu")
    versions = {"get_cann_version": lambda: "", "_is_gte_cann_version": lambda *_: False}
    _stand_in("torch_npu.npu.utils", **versions)
    _stand_in("torch_npu.npu._backends", get_soc_version=lambda: _A3)
    found = importlib.util.spec_from_file_location("torch_npu.kernels", packages / _KERNELS)
    assert found is not None and found.loader is not None
    found.loader.exec_module(importlib.util.module_from_spec(found))
    return library


def _stand_in(name: str, **given: object) -> None:
    module = ModuleType(name)
    module.__path__ = []
    module.__dict__.update(given)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
