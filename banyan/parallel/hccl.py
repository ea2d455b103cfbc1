"""Collectives of Ascend NPUs: process groups of the backend that the device's driver has registered
with torch.

Each group has buffers on each device: twice what HCCL_BUFFSIZE says.
"""

from banyan.ops.npu.collective_contracts import exchanged
from banyan.parallel.collectives import Meeting, Transport
from banyan.parallel.process_group import GroupCollectives, open_store
from banyan.platform.npu_driver import open_driver


class HcclCollectives(GroupCollectives):
    """Implements `NamedCollectives`."""

    def name(self) -> str:
        return self.group.get_hccl_comm_name(self._rank)


def _open(meeting: Meeting) -> HcclCollectives:
    driver = open_driver()
    met = (open_store(meeting), meeting.rank, meeting.size, meeting.timeout_s, meeting.name)
    group = driver.group(*met, is_exchange=meeting.is_exchange)
    return HcclCollectives(group, meeting, exchanged if driver.is_checked else None)


HCCL = Transport(declines=lambda meeting: None, open=_open)
