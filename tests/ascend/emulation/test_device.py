"""The emulated device behaves like one: its own memory and time, nothing shared by accident."""

import pytest
import torch

from tests.ascend.emulation.device import MEMORY_BYTES


def test_views_and_changes_in_place_reach_the_same_memory(npu):
    x = torch.zeros(2, 3, device="npu")
    x.view(3, 2)[1].fill_(5)
    x[0].add_(1)
    assert x.cpu().tolist() == [[1, 1, 6], [5, 0, 0]]


def test_tensors_of_host_and_device_do_not_mix(npu, on):
    with pytest.raises(RuntimeError, match="same device"):
        on(torch.ones(3)) + torch.ones(3)
    with pytest.raises(RuntimeError, match="one is on npu:0"):
        torch.where(on(torch.ones(3, dtype=torch.bool)), on(torch.ones(3)), torch.ones(3))


def test_tensors_of_two_devices_do_not_mix(npu):
    with pytest.raises(RuntimeError, match="npu:0 and npu:1|at least two devices"):
        torch.cat([torch.ones(3, device="npu:0"), torch.ones(3, device="npu:1")])


def test_a_copy_that_is_not_waited_for_has_not_arrived(npu, on):
    x, here = on(torch.arange(4.0)), torch.zeros(4, pin_memory=True)
    here.copy_(x, non_blocking=True)
    x.zero_()
    done = torch.npu.Event()
    done.record()
    early = here.clone()
    done.synchronize()
    assert early.tolist() != [0, 1, 2, 3]
    assert here.tolist() == [0, 1, 2, 3]


def test_an_event_brings_what_was_launched_before_it_only(npu, on):
    x = on(torch.ones(2))
    first, second = (torch.zeros(2, pin_memory=True) for _ in range(2))
    first.copy_(x, non_blocking=True)
    between = torch.npu.Event()
    between.record()
    second.copy_(x, non_blocking=True)
    between.synchronize()
    assert first.tolist() == [1, 1] != second.tolist()
    torch.npu.synchronize()
    assert second.tolist() == [1, 1]


def test_memory_ends_where_it_is_said_to_end(npu):
    npu.set_memory(torch.npu.memory_reserved() + (1 << 20))
    free, total = torch.npu.mem_get_info()
    kept = torch.zeros(free // 2, dtype=torch.uint8, device="npu")
    assert torch.npu.mem_get_info()[0] <= free - len(kept)
    with pytest.raises(torch.OutOfMemoryError, match=f"npu:0 has {total}"):
        torch.zeros(free, dtype=torch.uint8, device="npu")
    del kept
    assert torch.npu.mem_get_info() == (free, total)
    npu.set_memory(MEMORY_BYTES)


def test_copies_and_waits_are_counted(npu, on):
    x, here, before = on(torch.ones(4)), torch.zeros(4, pin_memory=True), npu.counters()
    here.copy_(x, non_blocking=True)
    x.sum().item()
    x.cpu()
    on(torch.ones(4))
    after = npu.counters()
    changes = {name: after[name] - before[name] for name in before if name != "operators"}
    assert changes == {"to_host": 3, "to_host_late": 1, "to_device": 1, "waits": 2}


def test_doubles_become_floats(npu, on):
    assert on(torch.ones(2, dtype=torch.float64)).dtype == torch.float32


def test_sizes_that_depend_on_numbers_wait_for_the_device(npu, on):
    x = on(torch.tensor([1.0, 0.0, 2.0]))
    before = npu.counters()["waits"]
    assert len(x[x > 0]) == 2
    assert npu.counters()["waits"] > before


class TestGraphs:
    def test_a_graph_reads_and_writes_the_memory_that_it_had(self, npu, on):
        x, out = on(torch.zeros(3)), on(torch.zeros(3))
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            out.copy_(x * 2 + 1)
        x.copy_(on(torch.tensor([1.0, 2.0, 3.0])))
        graph.replay()
        assert out.tolist() == [3, 5, 7]

    @pytest.mark.parametrize(
        "work",
        [
            lambda x: x.sum().item(),
            lambda x: x.cpu(),
            lambda x: torch.npu.synchronize(),
            lambda x: x.nonzero(),
            lambda x: x.copy_(torch.ones(3)),
        ],
        ids=["item", "copy to the host", "synchronize", "size from data", "copy from the host"],
    )
    def test_what_waits_or_reads_on_the_host_is_refused_while_captured(self, npu, on, work):
        x = on(torch.ones(3))
        with (
            pytest.raises(RuntimeError, match="not allowed while a graph is captured"),
            torch.npu.graph(torch.npu.NPUGraph()),
        ):
            work(x)
        assert x.sum().item() == 3  # the capture has ended


class TestStreams:
    def test_a_read_that_does_not_wait_for_a_write_is_found(self, npu, on, races):
        x, other = on(torch.ones(4)), torch.npu.Stream()
        with torch.npu.stream(other):
            x.add_(1)
        x.sum()
        (race,) = races()
        assert "aten::sum on stream 0 does not wait for aten::add on stream" in race

    def test_a_write_that_does_not_wait_for_a_read_is_found(self, npu, on, races):
        x, other = on(torch.ones(4)), torch.npu.Stream()
        with torch.npu.stream(other):
            x.sum()
        x.add_(1)
        assert "aten::add on stream 0 does not wait for aten::sum" in races()[0]

    @pytest.mark.parametrize(
        "order",
        [
            lambda stream: torch.npu.current_stream().wait_stream(stream),
            lambda stream: stream.record_event().synchronize(),
            lambda stream: torch.npu.current_stream().wait_event(stream.record_event()),
            lambda stream: stream.synchronize(),
            lambda stream: torch.npu.synchronize(),
        ],
        ids=["stream", "host, event", "event", "host, stream", "device"],
    )
    def test_work_that_is_ordered_is_no_race(self, npu, on, order):
        x, other = on(torch.ones(4)), torch.npu.Stream()
        with torch.npu.stream(other):
            x.add_(1)
        order(other)
        assert x.sum().item() == 8
        assert npu.races() == []

    def test_an_event_before_the_write_orders_nothing(self, npu, on, races):
        x, other = on(torch.ones(4)), torch.npu.Stream()
        early = other.record_event()
        with torch.npu.stream(other):
            x.add_(1)
        torch.npu.current_stream().wait_event(early)
        x.sum()
        assert len(races()) == 1
