"""Graphs of the emulated NPU: the operators that ran while one was captured, run again.

Results go to the addresses that they had. Lengths that an operator takes from the host are part of
the graph: they are updated before each replay. A replay without an update is refused, where a
device would compute with old ones, and so is one with the lengths of another step: the last key of
each row must be one that this replay has written.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from banyan.ascend.ops.contracts import ContractError

UPDATABLE = {
    "npu::npu_fused_infer_attention_score": ("actual_seq_lengths", "actual_seq_lengths_kv"),
    "npu::npu_fused_infer_attention_score_v2": ("actual_seq_qlen", "actual_seq_kvlen"),
}


"""Operator -> its arguments with the ends of rows and with their numbers of keys."""
Call = tuple[Any, tuple, dict[str, Any], list[Tensor]]
"""An operator, what it was given by place and by name, and its results."""
_SCATTER = "npu::npu_scatter_nd_update_"
_SCATTER_PAGES = "npu::npu_scatter_pa_kv_cache"
_PROLOG, _LATENTS = "npu::npu_mla_prolog_v3", 9
"""An operator that writes latents, and which of its arguments they are."""
_SPARSE = "npu::npu_sparse_flash_attention"
"""Attention that finds its lengths on the device; they may be wrong all the same."""


class Graph:
    """`torch.npu.NPUGraph`."""

    def __init__(self, core: ModuleType) -> None:
        self.core = core
        self.takes_updates = False
        self._calls: list[Call] = []
        self._is_ready = False
        self._is_set = True
        self._written: dict[int, set[int]] = {}
        """Memory of pages -> the places that were written last, in this run."""

    def keep(self, operator: Any, args: tuple, named: dict[str, Any], result: object) -> None:
        self._calls.append((operator, args, named, _tensors(result)))

    def seal(self) -> None:
        self._is_ready = True
        self._is_set = not self._updatable()

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def update(self, cpu_update_input: list[dict[str, list[int]]]) -> None:
        """New lengths: one dict for all operators that take them, or one for each. An argument that
        was not given by keyword when it was captured stays as it is, as with torch_npu."""
        if not self.takes_updates:
            raise ContractError("the graph was not captured with auto_dispatch_capture")
        calls = self._updatable()
        given = cpu_update_input
        if len(given) not in (1, len(calls)):
            raise ContractError(f"{len(given)} updates for {len(calls)} operators: give 1, or each")
        for at, (operator, _, named, _) in enumerate(calls):
            for key, value in given[at if len(given) > 1 else 0].items():
                if key in named and key in UPDATABLE[operator._schema.name]:
                    named[key] = list(value)
        self._is_set = all(self._has_heard(call, given) for call in calls)

    def _has_heard(self, call: "Call", given: list[dict[str, list[int]]]) -> bool:
        """Whether an operator's numbers of keys are among the given ones."""
        operator, _, named, _ = call
        keys = UPDATABLE[operator._schema.name][1]
        return keys in named and all(keys in reported for reported in given)

    def replay(self) -> None:
        if not self._is_ready:
            raise ContractError("the graph was not captured to its end")
        if not self._is_set:
            raise ContractError("the graph is replayed with the lengths of its last run")
        self._is_set = not self._updatable()
        self._written.clear()
        for operator, args, named, results in self._calls:
            self._follow(operator._schema.name, args, named)
            again = _tensors(operator(*args, **named))
            for there, here in zip(results, again, strict=True):
                if there.data_ptr() != here.data_ptr() and there.numel():
                    there.copy_(here)

    def _follow(self, name: str, args: tuple, named: dict[str, Any]) -> None:
        """Hold the lengths of attention against what this run has written."""
        if name == _SCATTER:
            places = self.core.host_alias(args[1]).flatten().tolist()
            self._written[args[0].data_ptr()] = set(places)
        if name == _PROLOG:
            places = self.core.host_alias(named["cache_index"]).tolist()
            self._written[args[_LATENTS].data_ptr()] = set(places)
        if name == _SCATTER_PAGES:
            self._written[args[2].data_ptr()] = set(self.core.host_alias(args[4]).tolist())
        attends = name in UPDATABLE or name == _SPARSE
        written = self._written.get(args[1].data_ptr()) if attends else None
        if written is None:
            return
        table, size, lengths = self.core.host_alias(named["block_table"]), args[1].shape[1], []
        if name == _SPARSE:
            lengths = self.core.host_alias(named["actual_seq_lengths_kv"]).tolist()
        else:
            size, lengths = named["block_size"], named[UPDATABLE[name][1]]
        for row, length in enumerate(lengths):
            last, after = (_place(table[row], at, size) for at in (length - 1, length))
            if last not in written or (after >= size and after in written):  # page 0 is padding
                raise ContractError(
                    f"row {row} of the graph attends up to position {length - 1}, which is not the "
                    "last one that this step has written: its lengths are those of another step"
                )

    def _updatable(self) -> list["Call"]:
        return [call for call in self._calls if call[0]._schema.name in UPDATABLE]


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        named = dict(kwargs or {})
        result = func(*args, **named)
        touched = [x for x in tree_leaves((args, named, result)) if isinstance(x, Tensor)]
        if any(x.device.type == "npu" for x in touched):  # what the host does is done once
            self._graph.keep(func, args, named, result)
        return result


@contextlib.contextmanager
def capture(
    graph: Graph,
    pool: object = None,
    stream: torch.Stream | None = None,
    auto_dispatch_capture: bool = False,
) -> Iterator[None]:
    """`torch.npu.graph`: what runs inside is kept. Nothing inside may wait or read on the host."""
    graph.takes_updates = auto_dispatch_capture
    graph.core.set_capturing(True)
    try:
        with _Recorder(graph), stream if stream is not None else contextlib.nullcontext():
            yield
    finally:
        graph.core.set_capturing(False)
    graph.seal()


def _place(pages: Tensor, position: int, size: int) -> int:
    """Where a position of a row lies, among all pages; behind those of the row in none."""
    if position // size >= len(pages):
        return -1
    return int(pages[position // size]) * size + position % size


def _tensors(result: object) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]
