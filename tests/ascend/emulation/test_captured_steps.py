"""Steps of each size of graph, kind of attention and way to draft: how much comes to the host, and
that lengths of another step are caught."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import banyan
from banyan.ascend.ops.contracts import ContractError
from banyan.ascend.ops.operators import AttentionOperators
from banyan.ascend.platform import _LengthGraph
from banyan.base.errors import BanyanError
from banyan.runner.batch import Batch
from banyan.runner.captured_forward import CapturedForward
from tests.ascend.emulation.device import EmulatedNpu
from tests.ascend.emulation.graph import Graph
from tests.ascend.emulation.test_drafts import made
from tests.models.families import tiny
from tests.support.emulated import CAPTURED, IN_ALL, LATENT, ROOM, start

DENSE, LATENTS, SPARSE = "dense", "latents", "an indexer"
MODELS = {
    DENSE: ("qwen3", {"head_dim": 128}),
    LATENTS: ("deepseek v3", LATENT),
    SPARSE: ("deepseek v3.2", CAPTURED["deepseek v3.2"]),
}
DRAFTERS = {
    DENSE: ("", "NGRAM", "EAGLE"),
    LATENTS: ("", "NGRAM", "NEXTN"),
    SPARSE: ("", "NGRAM", "NEXTN of an indexer"),
}
DRAFTED = 4
"""Tokens of a row with its drafts."""
OUT, WAITS = 2, 1
"""Of a step: copies to the host, all of them late, and waits. A model that drafts adds a copy for
each row and a wait."""
SIZES = (1, 2, 4, 8)
IN_TEST = {
    *((DENSE, "", rows) for rows in SIZES),
    *((DENSE, "NGRAM", 2), (LATENTS, "NEXTN", 1), (SPARSE, "", 2)),
}
CASES = [
    pytest.param(*case, marks=() if case in IN_TEST else IN_ALL, id="-".join(map(str, case)))
    for kind, drafters in DRAFTERS.items()
    for case in ((kind, drafter, rows) for drafter in drafters for rows in SIZES)
]


def flags_of(kind: str, drafter: str, folder: Path) -> dict[str, object]:
    """A tiny model in the folder, and the flags of what drafts for it."""
    if drafter.startswith(("EAGLE", "NEXTN")):
        return made(drafter, folder)
    variant, sizes = MODELS[kind]
    tiny(variant, folder, num_hidden_layers=2, **ROOM, **sizes)
    named = {"speculative_algorithm": drafter, "speculative_num_draft_tokens": DRAFTED}
    return named | {"disable_adaptive_drafts": True} if drafter else {}


@dataclass
class Watch:
    """What an engine's steps are.

    Attributes:
        shapes: rows and tokens of each of the steps; no rows where it is no graph's.
        at_work: tokens of a row, of the graph that is captured.
        refused: shapes of replays that were refused for their lengths.
        wrong: the shape whose replays get wrong ones.
    """

    shapes: list[tuple[int, int]] = field(default_factory=list)
    replays: int = 0
    at_work: int = 0
    refused: list[tuple[int, int]] = field(default_factory=list)
    wrong: tuple[int, int] = (0, 0)

    def listen(self, patch: pytest.MonkeyPatch) -> None:
        shape_of, replay = CapturedForward._shape_of, Graph.replay

        def shaped(forward: CapturedForward, batch: Batch) -> tuple[int, int]:
            self.shapes.append(shape_of(forward, batch))
            return self.shapes[-1]

        def replayed(graph: Graph) -> None:
            self.replays += 1
            try:
                replay(graph)
            except ContractError as error:
                assert "its lengths are those of another step" in str(error)
                self.refused.append(self.shapes[-1])
                raise

        patch.setattr(CapturedForward, "_shape_of", shaped)
        patch.setattr(Graph, "replay", replayed)

    def tell_wrong(self, patch: pytest.MonkeyPatch) -> None:
        """Passed to graphs that take the lengths of their rows."""
        replay = _LengthGraph.replay

        def late(graph: _LengthGraph, lengths: Sequence[int] = ()) -> None:
            is_wrong = bool(lengths) and self.shapes[-1] == self.wrong
            replay(graph, [n - 1 for n in lengths] if is_wrong else lengths)

        patch.setattr(_LengthGraph, "replay", late)

    def find_wrong(self, patch: pytest.MonkeyPatch) -> None:
        """In graphs that find the lengths of their rows on the device."""
        work, ends_of = CapturedForward._work, AttentionOperators.ends_of

        def noted(forward: CapturedForward, rows: int, count: int = 1):
            inner = work(forward, rows, count)

            def run() -> None:
                self.at_work = count
                inner()
                self.at_work = 0

            return run

        def late(operators: AttentionOperators, device, starts, contexts) -> tuple:
            ends, lengths = ends_of(operators, device, starts, contexts)
            is_wrong = self.at_work and self.at_work == self.wrong[1]
            return ends, lengths - (lengths > 25).int() if is_wrong else lengths

        patch.setattr(CapturedForward, "_work", noted)
        patch.setattr(AttentionOperators, "ends_of", late)


def ask(engine: banyan.Engine, rows: int, tokens: int) -> None:
    """Greedy and unscored, so that graphs sample; prompts that repeat themselves."""
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
    ids = [[5 + 3 * (i % 7) for i in range(21)]] * rows
    engine.generate(input_ids=ids, sampling_params=params)


@pytest.fixture
def watch(monkeypatch) -> Iterator[Watch]:
    watch = Watch()
    watch.listen(monkeypatch)
    yield watch


@pytest.mark.parametrize(("kind", "drafter", "rows"), CASES)
def test_nothing_is_waited_for_but_results_and_wrong_lengths_are_caught(
    npu: EmulatedNpu, tmp_path, monkeypatch, watch: Watch, kind: str, drafter: str, rows: int
) -> None:
    shape = (rows, DRAFTED if drafter else 1)
    flags = flags_of(kind, drafter, tmp_path)
    flags |= {"dtype": "float16", "cuda_graph_bs": [rows], "max_total_tokens": 4096}
    with start(tmp_path, "npu", **flags) as engine:
        ask(engine, rows, 6)
        watch.shapes.clear()
        watch.replays = 0
        before = npu.counters()
        ask(engine, rows, 16)
        after = npu.counters()
        steps = watch.shapes.copy()
        assert shape in steps and watch.replays == sum(rows > 0 for rows, _ in steps) > 4
        is_model = drafter not in ("", "NGRAM")
        out, waits = OUT + is_model * rows, WAITS + is_model
        counted = {name: after[name] - before[name] for name in after}
        assert counted["to_host"] == counted["to_host_late"] == out * len(steps)
        assert counted["waits"] == waits * len(steps)
        assert not watch.refused
        watch.wrong = shape
        if kind != SPARSE:
            watch.tell_wrong(monkeypatch)
            with contextlib.suppress(BanyanError):
                ask(engine, rows, 16)
    if kind == SPARSE:
        watch.find_wrong(monkeypatch)
        with start(tmp_path, "npu", **flags) as engine, contextlib.suppress(BanyanError):
            ask(engine, rows, 16)
    assert watch.refused and set(watch.refused) == {shape}
