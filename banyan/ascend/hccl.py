"""Collectives of Ascend NPUs: process groups of HCCL, which the driver registers with torch.

Each group has buffers of twice HCCL_BUFFSIZE on each device.
"""

from typing import Any

import torch
from torch import Tensor

from banyan.ascend.driver import open_driver
from banyan.ascend.ops.contracts import exchanged
from banyan.parallel.collectives import Rendezvous, Transport
from banyan.parallel.process_group import Check, GroupCollectives, open_store

_MOST, _LEAST, _OF_UNIT = 127, 1e-12, 4
"""Largest int8 number, least row maximum, and bytes of a scale."""


class HcclCollectives(GroupCollectives):
    """Implements `NamedCollectives`.

    Args:
        is_rounded: rows travel to experts as int8, each followed by its fp32 scale.
    """

    def __init__(
        self, group: Any, rendezvous: Rendezvous, check: Check | None, is_rounded: bool
    ) -> None:
        super().__init__(group, rendezvous, check)
        self._is_rounded = is_rounded

    def name(self) -> str:
        return self.group.get_hccl_comm_name(self._rank)

    def _carry(self, sent: list[Tensor], coming: list[int]) -> Tensor:
        if not self._is_rounded:
            return super()._carry(sent, coming)
        rows, dtype = torch.cat(sent).float(), sent[0].dtype
        units = rows.abs().amax(1).clamp(min=_LEAST) / _MOST  # [rows]
        numbers = (rows / units.unsqueeze(1)).round().to(torch.int8)
        packed = torch.cat([numbers, units.view(torch.int8).view(len(rows), _OF_UNIT)], 1)
        came = self._exchange(list(packed.split([len(part) for part in sent])), coming)
        units = came[:, -_OF_UNIT:].flatten().view(torch.float32).unsqueeze(1)
        return (came[:, :-_OF_UNIT].float() * units).to(dtype)


def _open(rendezvous: Rendezvous) -> HcclCollectives:
    driver = open_driver()
    group = driver.group(
        store=open_store(rendezvous),
        rank=rendezvous.rank,
        size=rendezvous.size,
        timeout_s=rendezvous.timeout_s,
        name=rendezvous.name,
        is_exchange=rendezvous.is_exchange,
    )
    check = exchanged if driver.is_checked else None
    return HcclCollectives(group, rendezvous, check, driver.rounds_sent)


HCCL = Transport(declines=lambda rendezvous: None, open=_open)
