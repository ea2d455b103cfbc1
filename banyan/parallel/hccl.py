"""Collectives of Ascend NPUs: process groups of the backend that the device's driver has registered
with torch.

Each group has buffers on each device: twice what HCCL_BUFFSIZE says.
"""

from banyan.ops.npu.collective_contracts import exchanged
from banyan.parallel.collectives import Meeting, Transport
from banyan.parallel.process_group import GroupCollectives, open_store
from banyan.platform.npu_driver import open_driver


def _open(meeting: Meeting) -> GroupCollectives:
    driver = open_driver()
    met = (open_store(meeting), meeting.rank, meeting.size, meeting.timeout_s, meeting.name)
    return GroupCollectives(driver.group(*met), meeting, exchanged if driver.is_checked else None)


HCCL = Transport(declines=lambda meeting: None, open=_open)
