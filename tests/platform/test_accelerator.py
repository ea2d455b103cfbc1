"""What devices have in common, on a library that only remembers what was asked of it."""

import weakref
from contextlib import contextmanager

import torch

from banyan.platform.accelerator import Accelerator, Graphs
from banyan.platform.base import Traits
from banyan.platform.cuda import _Captured


class Library:
    """Graphs that, as those of devices, keep addresses and no tensors."""

    class CUDAGraph:
        def pool(self):
            return 1

        def replay(self):
            return None

    def synchronize(self):
        return None

    @contextmanager
    def graph(self, graph, pool, stream):
        yield


def test_a_graph_keeps_the_tensors_that_its_work_holds():
    library = Library()
    traits = Traits("any", "cpu", (), (), (), True, frozenset(), 1)
    device = Accelerator(library, traits, Graphs(library.CUDAGraph, _Captured))

    def work_on(tensor: torch.Tensor):
        return lambda: tensor.add_(1)

    held = torch.zeros(3)
    seen = weakref.ref(held)
    graph = device.capture(work_on(held))
    del held
    assert seen() is not None
    graph.replay()
    del graph
    assert seen() is None
