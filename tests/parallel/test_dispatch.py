"""Rows that go to the ranks of their experts alone (--moe-a2a-backend deepep) have the bits of rows
that go everywhere, whatever the replicas bring, and wherever experts lie."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from banyan.base.clock import WallClock
from banyan.base.errors import ConfigError
from banyan.config.resolve import resolve
from banyan.dp_attention.batch import DPAttentionRows
from banyan.dp_attention.rules import of_replica
from banyan.engine.model_loader import Phases, open_model
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from banyan.moe.eplb import trivial
from banyan.moe.expert_location import ExpertMap
from banyan.moe.layer import ExpertBlock
from banyan.ops.bind import bind, open_toolkit
from banyan.parallel.groups import Groups
from tests.models.families import tiny
from tests.parallel.ranks import meet, needs_compiler, together
from tests.parallel.test_joined import Layout, answer_all
from tests.support.configs import NOTHING
from tests.support.experts import EXPERTS
from tests.support.flags import config_of

IS_ALL = os.environ.get("PARALLEL") == "all"
EIGHT = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
SIX, DENSE = "qwen3 moe, six of 21", "qwen2 moe, some dense"
TWO = (
    Layout(SIX),
    Layout(DENSE, is_eager=True),
    Layout(DENSE, copies="dynamic"),
    Layout(DENSE, copies="static", balances=True),
)
GLOO = (
    Layout(SIX, library="gloo"),
    Layout(DENSE, library="gloo", copies="static"),
    Layout(SIX, library="nccl"),
)
FOUR = (
    Layout(DENSE, ranks=2),
    Layout(DENSE, ranks=2, copies="static", balances=True),
    Layout(DENSE, replicas=4),
)
WORLDS = {2: (TWO + GLOO, {}), 4: (FOUR, EIGHT)}


@needs_compiler
@pytest.mark.parametrize("size", WORLDS if IS_ALL else [2])
def test_rows_that_are_sent_change_no_bit(size, tmp_path):
    """Replicas with many rows, few and none: prompts in chunks, and answers; and experts that move
    while both have requests."""
    layouts, sizes = WORLDS[size]
    for variant in {layout.variant for layout in layouts}:
        tiny(variant, tmp_path / variant, **sizes)
    layouts = layouts if IS_ALL else TWO
    both = [replace(x, are_experts_apart=True, sends_rows=s) for x in layouts for s in (0, 1)]
    asked = [(layout, tmp_path / layout.variant) for layout in both]
    for rank, found in enumerate(together(size, tmp_path, answer_all, asked)):
        assert isinstance(found, list), found
        usual = found[2 * layouts.index(Layout(DENSE, copies="dynamic"))] if size == 2 else found[0]
        for layout, plain, sent in zip(layouts, found[::2], found[1::2], strict=True):
            assert bool(plain["moves"] and sent["moves"]) == layout.balances
            if layout.balances:
                assert plain["together"] == usual["together"]
            assert sent["how"] == plain["how"]
            assert sent["empty steps"] > 20
            assert sent["alone"] == sent["together"] or layout.library != "shared"
            assert any(tokens for tokens, *_ in sent["alone"])
            for what in ("alone", "together"):
                if layout.library == "shared":
                    assert sent[what] == plain[what], (layout, rank)
                tokens = [[a[0] for a in one[what]] for one in (sent, plain)]
                assert tokens[0] == tokens[1], (layout, rank)


def experts_seen(rank: int, size: int, address: str, folder: str) -> list[int]:
    """Rows that have come to this rank's experts, where all ranks give two rows each."""
    torch.set_num_threads(1)
    kit = open_toolkit("cpu", 1, {})
    ops = bind("cpu", torch.device("cpu"), torch.float32, frozenset(), 16, exact=True, toolkit=kit)
    joint = DPAttentionRows(rank, size, 1)
    joint.enter([2] * size)
    group = meet("gloo", rank, size, address).of_rows(joint)
    groups = Groups.with_experts_apart(group)
    model_config = read_model_config(folder)
    assert model_config.experts is not None
    count = model_config.experts.count
    places = ExpertMap(trivial(model_config.num_layers, count, count), count, rank, size, "static")
    found = []
    for build in (
        Build(ops, groups, sends_rows=True),
        Build(ops, groups, sends_rows=True, places=places),
    ):
        model = load_model(model_config, build)
        assert isinstance(model, torch.nn.Module)
        block = next(m for m in model.modules() if isinstance(m, ExpertBlock))
        assert block.experts.packed is not None
        packed, block.experts.packed = block.experts.packed, Counted(block.experts.packed, found)
        assert packed is not None
        block(
            torch.randn(2, model_config.hidden_size, generator=torch.Generator().manual_seed(rank))
        )
    return found


class Counted:
    """Packed experts that count the rows that are not zero."""

    def __init__(self, packed, found: list[int]) -> None:
        self._packed, self._found = packed, found

    def __call__(self, x, *more):
        self._found.append(int(x.any(1).sum()))
        return self._packed(x, *more)

    def apart(self, x, *more):
        self._found.append(int(x.any(1).sum()))
        return self._packed.apart(x, *more)


@needs_compiler
def test_a_row_comes_to_the_ranks_of_its_experts_alone(tmp_path):
    """One expert for each token: a row comes to one rank, and not to both."""
    tiny("qwen3 moe, six of 21", tmp_path, num_experts_per_tok=1)
    counts = together(2, tmp_path, experts_seen, str(tmp_path))
    for one, other in zip(*counts, strict=True):
        assert one + other == 4


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), (False, 0)),
        (("--moe-a2a-backend", "none"), (False, 0)),
        (("--moe-a2a-backend", "deepep", "--deepep-mode", "normal"), (True, 0)),
        (("--moe-a2a-backend", "deepep"), (True, 128 * 2 * EXPERTS.hidden_size * 4)),
    ],
)
def test_the_flags_decide_whether_rows_are_sent(flags, expected, monkeypatch):
    """The groups are opened as the flags say; meeting is all that is left to do."""

    def report(config):
        raise TimeoutError((config.are_experts_apart, config.slot_bytes))

    monkeypatch.setattr("banyan.engine.model_loader.open_groups", report)
    config = config_of("--tp", "2", "--dp", "2", "--enable-dp-attention", *flags)
    config = of_replica(resolve(config, EXPERTS, NOTHING), 1, "/meeting")
    with pytest.raises(TimeoutError) as found:
        open_model(config, EXPERTS, 0, "", Phases(WallClock()))
    assert found.value.args[0] == expected


def test_devices_that_are_no_cpus_are_refused_by_name(monkeypatch):
    traits = SimpleNamespace(is_host=False, shares_steps=False, name="an accelerator")
    monkeypatch.setattr(
        "banyan.engine.model_loader.open_platform", lambda name: SimpleNamespace(traits=traits)
    )
    config = resolve(config_of("--tp", "2", "--moe-a2a-backend", "deepep"), EXPERTS, NOTHING)
    with pytest.raises(ConfigError, match="deepep: .* NPUs only, this is an accelerator"):
        open_model(config, EXPERTS, 0, "", Phases(WallClock()))
