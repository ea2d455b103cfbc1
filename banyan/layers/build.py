"""Build: kernels, process groups and features from which every layer of one rank is made."""

from dataclasses import dataclass

import torch

from banyan.lora.targets import LoRATargets
from banyan.moe.expert_location import ExpertMap
from banyan.moe.expert_watch import ExpertWatch
from banyan.ops.api import Ops
from banyan.parallel.groups import ALONE, Groups
from banyan.platform.base import Ranges, SideStream


@dataclass(frozen=True)
class Build:
    """Attributes:
    ops: the bound kernels.
    groups: the ranks that share each kind of weight.
    dtype: of activations and unpacked weights.
    kv_units: scale of cached keys and values by layer; () = 1 for all layers.
    adapters: tables of LoRA adapters; None = LoRA is off.
    watch: records the experts that tokens choose; None = not recorded.
    places: location of each expert; None = in order, without copies.
    sends_rows: each row is sent only to the ranks of its experts (all-to-all), not gathered on
        all ranks.
    exchanged: most tokens per rank for an all-to-all of fixed size in `groups.exchange`; 0 =
        the all-to-all exchanges counts first.
    is_fused: one operator does the all-to-all and the experts; larger batches take several
        calls.
    side_stream: runs the shared experts in parallel with the routed ones; None = one stream.
    ranges: marks each layer for profilers of others; None = not marked.
    state_dtype: of the state matrices that layers keep between steps.
    """

    ops: Ops
    groups: Groups = ALONE
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    kv_units: tuple[float, ...] = ()
    adapters: LoRATargets | None = None
    watch: ExpertWatch | None = None
    places: ExpertMap | None = None
    sends_rows: bool = False
    exchanged: int = 0
    is_fused: bool = False
    side_stream: SideStream | None = None
    ranges: Ranges | None = None
    state_dtype: torch.dtype = torch.float32
