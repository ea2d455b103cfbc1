"""Build: what every layer of one rank is made from. Layers take it whole and keep what they use."""

from dataclasses import dataclass

import torch

from banyan.lora.targets import LoRATargets
from banyan.moe.expert_location import ExpertMap
from banyan.moe.expert_watch import ExpertWatch
from banyan.ops.api import Ops
from banyan.parallel.groups import ALONE, Groups
from banyan.platform.base import SideStream


@dataclass(frozen=True)
class Build:
    """
    Attributes:
        ops: the bound kernels.
        groups: the ranks that share each kind of weight.
        dtype: of activations and unpacked weights.
        kv_units: by layer, what its keys and values are kept in units of; () = 1 for all.
        adapters: what may lie beside the projections; None = nothing ever does.
        watch: told of the experts that tokens choose; None = nobody is.
        places: where experts lie; None = in their order, and without copies.
        sends_rows: rows go to the ranks of their experts alone, instead of to all ranks.
        exchanged: most tokens of a rank for which they do so in an exchange of a fixed size, by
            `groups.exchange`; 0 = by their counts.
        is_fused: one operator makes that exchange and what experts compute, so more rows go in
            several of them.
        side_stream: runs the shared experts in parallel with the routed ones; None = one stream.
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
