"""Dense projections with oneDNN, on weights that are packed once at load.

oneDNN's packed products sum in one order for any number of rows; plain matrix products do not. So a
decode row, a chunk and a whole prompt agree bit for bit (measured; see the tests).
"""

import torch
from torch import Tensor

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.stored import StoredWeight


class OneDnnLinear:
    """A dense weight [out, in] in oneDNN's own layout."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


def _supports(spec: OpSpec) -> str | None:
    if spec.device.type != "cpu":
        return f"tensors are on {spec.device.type}"
    if not torch.backends.mkldnn.is_available():
        return "this torch is built without oneDNN"
    if spec.dtype != torch.float32:
        return f"packs fp32, activations are {spec.dtype}"
    return None


def _pack(
    weight: StoredWeight, dtype: torch.dtype, device: torch.device, is_head: bool = False
) -> OneDnnLinear:
    return OneDnnLinear(weight.dense.to(device, dtype))


onednn = Kernel(run=_pack, supports=_supports)
