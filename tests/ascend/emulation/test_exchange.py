"""Rows of experts in exchanges of a fixed size, of two ranks on devices of an emulated NPU: what
comes back, again when it is a graph, and what the operators refuse.
"""

import os
import re

import pytest
import torch

from banyan.ascend.hccl import HcclCollectives
from banyan.ascend.launch.expert_rules import buffer_bytes as launched
from banyan.ascend.launch.facts import LaunchModel
from banyan.ascend.ops.contracts import ContractError
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.product_contracts import A2, A3, MIB, dispatch_of
from banyan.ascend.platform import NpuPlatform
from banyan.ops import reference
from banyan.ops.activation_quant import DYNAMIC, Rounding
from banyan.ops.bind import bind, open_toolkit
from banyan.ops.experts_api import Ranks, StoredExperts
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import GroupsConfig, open_groups
from banyan.platform.expert_exchange import Dispatch
from tests.ascend.emulation.device import EmulatedNpu, install
from tests.ascend.emulation.exchange_cases import exchange_cases
from tests.ascend.emulation.exchanges import Tokens, how_far
from tests.parallel.ranks import together

IN_ALL = pytest.mark.skipif(os.environ.get("NPU_CASES") != "all", reason="NPU_CASES is not all")
EXPERTS, PER_TOKEN, DIM, INNER = 6, 3, 1024, 32
PLAIN, BIASED, ROUNDED = "plain", "with biases", "of 8 bits"
NEAR = {PLAIN: 0.02, BIASED: 0.02, ROUNDED: 0.15}
"""Rows of 8 bits are rounded twice."""


def stored(x: torch.Tensor, kind: str) -> StoredWeight:
    if kind != ROUNDED:
        return StoredWeight.from_tensor(x)
    scale = x.abs().amax(1) / 127
    numbers = (x / scale.unsqueeze(1)).round().to(torch.int8)
    return StoredWeight(DYNAMIC, tuple(x.shape), Rounding(numbers, scale).raw)


def weights(kind: str) -> StoredExperts:
    """All of them."""
    draw = torch.Generator().manual_seed(3)

    def matrices(*shape: int) -> tuple[StoredWeight, ...]:
        each = (torch.randn(shape, generator=draw) / shape[1] ** 0.5 for _ in range(EXPERTS))
        return tuple(stored(x, kind) for x in each)

    biases = None
    if kind == BIASED:
        a, b, c = (torch.randn(EXPERTS, n, generator=draw) for n in (INNER, INNER, DIM))
        biases = (a, b, c)
    gate, up, down = matrices(INNER, DIM), matrices(INNER, DIM), matrices(DIM, INNER)
    return StoredExperts(0, gate, up, down, "silu", biases, total=EXPERTS)


def half(whole: StoredExperts, rank: int) -> StoredExperts:
    mine = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
    biases = None
    if whole.biases is not None:
        a, b, c = (part[mine] for part in whole.biases)
        biases = (a, b, c)
    parts = (whole.gate[mine], whole.up[mine], whole.down[mine])
    return StoredExperts(mine.start, *parts, "silu", biases, total=EXPERTS)


tokens_of = Tokens(DIM, EXPERTS, PER_TOKEN, torch.float16)


def bound(rank: int):
    """The platform, and the ops of a rank."""
    os.environ |= {"BANYAN_NPU": "tests.ascend.emulation", "BANYAN_NPU_CHECKS": "1"}
    install(os.environ.get("BANYAN_NPU_SOC", "A3"))
    platform = NpuPlatform()
    device = platform.open(rank, 1)
    toolkit = open_toolkit("npu", 1, {})
    kinds = (platform.traits.features, 64)
    return platform, bind("npu", device, torch.float16, *kinds, toolkit=toolkit, page_size=128)


def exchange(rank: int, size: int, address: str, kind: str) -> list:
    """Of each of several steps: how far the rows of this rank are from what they should be."""
    platform, ops = bound(rank)
    groups = open_groups(
        GroupsConfig(rank, size, address, ("hccl",), 60, are_experts_apart=True, has_exchange=True)
    )
    ranks, whole = groups.exchange.ranks, weights(kind)
    packed = ops.pack_experts(half(whole, rank))
    assert packed._gate_up.rounds == packed._down.rounds == (kind == ROUNDED)
    dense = reference.pack_experts(whole, torch.float32, torch.device("cpu"))
    return how_far(platform, packed, dense, ranks, tokens_of)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(BIASED, marks=pytest.mark.full), ROUNDED, pytest.param(PLAIN, marks=IN_ALL)],
)
def test_what_comes_back_is_the_sum_over_the_experts(npu: EmulatedNpu, tmp_path, kind: str) -> None:
    for found in together(2, tmp_path, exchange, kind):
        assert isinstance(found, list), found
        assert len(found) == 5 and max(found) < NEAR[kind]


def test_experts_of_8_bits_are_those_of_the_scheme(npu: EmulatedNpu) -> None:
    """Rows and what is between the two products have a unit of each; sums are of whole numbers."""
    _, ops = bound(0)
    whole, (x, ids, shares) = weights(ROUNDED), tokens_of(0, 5, 9)
    device = torch.device("npu", 0)
    packed = ops.pack_experts(whole)
    found = packed(*(part.to(device) for part in (x, ids, shares))).cpu().float()

    def product(rows: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
        each = Rounding.of(weight.raw, weight.type)
        unit = rows.float().abs().amax(-1, keepdim=True) / 127
        numbers = (rows.float() / unit).round()
        return (numbers @ each.numbers.float().t() * each.scale * unit).half()

    wanted = torch.zeros(5, DIM)
    for token, of_token in enumerate(ids.tolist()):
        for at, expert in enumerate(of_token):
            row = x[token : token + 1]
            gate, up = product(row, whole.gate[expert]), product(row, whole.up[expert])
            inner = (torch.nn.functional.silu(gate.float()) * up.float()).half()
            wanted[token] += (product(inner, whole.down[expert]) * shares[token, at].half())[0]
    assert (found - wanted).abs().max() < 0.004


def counted(rank: int, size: int, address: str, is_rounded: bool) -> tuple[list, float, int]:
    """Types of what was exchanged, how far the rows that came are off, and how many these are."""
    os.environ["DEEP_NORMAL_MODE_USE_INT8_QUANT"] = str(int(is_rounded))
    bound(rank)
    groups = open_groups(
        GroupsConfig(0, 1, address, ("hccl",), 60, replica=rank, replicas=2, are_experts_apart=True)
    )
    assert groups.dp_batch is not None
    groups.dp_batch.tokens.enter([4, 3])
    device, kinds = torch.device("npu", rank), list[torch.dtype]()
    exchange = HcclCollectives._exchange

    def watched(group: HcclCollectives, sent: list, coming: list) -> torch.Tensor:
        kinds.append(sent[0].dtype)
        return exchange(group, sent, coming)

    HcclCollectives._exchange = watched
    rows = [tokens_of(r, 4 - r, 1) for r in range(2)]
    ids = torch.cat([part[1] for part in rows])
    came = groups.experts.dispatch_rows(rows[rank][0].to(device), ids.to(device), EXPERTS // 2)
    mine = (ids // (EXPERTS // 2) == rank).any(1)
    whole = torch.cat([part[0] for part in rows]).float()
    off = (came.cpu().float() - whole)[mine].abs() / whole[mine].abs().amax(1, keepdim=True)
    groups.dp_batch.tokens.enter([2, 0])  # the second has nothing to send
    x, ids, _ = tokens_of(0, 2, 1)
    given = x[: 2 - 2 * rank].to(device)
    came = groups.experts.dispatch_rows(given, ids.to(device), EXPERTS // 2)
    assert came.shape == (2, DIM)
    return kinds[:1], float(off.max()), int(mine.sum())


@pytest.mark.parametrize("is_rounded", [True, False])
def test_rows_that_are_sent_by_their_counts_are_of_8_bits_if_asked_for(npu, tmp_path, is_rounded):
    for found in together(2, tmp_path, counted, is_rounded):
        assert isinstance(found, tuple), found
        kinds, off, count = found
        assert kinds == [torch.int8 if is_rounded else torch.float16] and count > 3
        assert 0 < off < 0.5 / 127 + 1e-3 if is_rounded else off == 0


def unchanged(rank: int, size: int, address: str) -> list[float]:
    """How far what experts leave as it is comes back changed, by the cases of these operators."""
    platform, _ = bound(rank)
    groups = open_groups(
        GroupsConfig(rank, size, address, ("hccl",), 60, are_experts_apart=True, has_exchange=True)
    )
    device, limits = torch.device("npu", rank), platform.traits.dispatch
    assert limits is not None
    found = []
    for case in exchange_cases(groups.exchange.ranks, limits):
        (got,) = case.run(Operators(is_checked=True), lambda x: x.to(device))
        found.append(float((got.cpu().float() - case.wanted()[0]).abs().max()) / case.slack)
    return found


def test_what_experts_leave_as_it_is_comes_back_so(npu: EmulatedNpu, tmp_path) -> None:
    for found in together(2, tmp_path, unchanged):
        assert isinstance(found, list), found
        assert len(found) == 4 and max(found) < 1


def refuse(rank: int, size: int, address: str) -> list[str]:
    """What is said of exchanges that cannot be; both ranks try the same."""
    os.environ["DEEPEP_HCCL_BUFFSIZE"] = "32"
    platform, _ = bound(rank)
    groups = open_groups(
        GroupsConfig(rank, size, address, ("hccl",), 60, are_experts_apart=True, has_exchange=True)
    )
    ranks, limits = groups.exchange.ranks, platform.traits.dispatch
    assert limits is not None
    operators, device = Operators(is_checked=False), torch.device("npu", rank)
    x, ids, share = (part.to(device) for part in tokens_of(rank, 4, 0))
    small = ids.int()
    far = Ranks(ranks.name, 1 - rank, 2)
    wide = torch.zeros(200, 7168, dtype=torch.float16, device=device)
    many = torch.zeros(200, PER_TOKEN, dtype=torch.int32, device=device)
    sent = operators.experts.dispatch(x, small, share, ranks, EXPERTS, limits)
    tries = [
        lambda: operators.experts.dispatch(x, small + EXPERTS, share, ranks, EXPERTS, limits),
        lambda: operators.experts.dispatch(
            x, small, share, Ranks("nobody", rank, 2), EXPERTS, limits
        ),
        lambda: operators.experts.dispatch(x, small, share, far, EXPERTS, limits),
        lambda: operators.experts.dispatch(wide, many, many.float(), ranks, EXPERTS, limits),
        lambda: operators.experts.combine(
            sent.rows[:5], sent, small, share, ranks, EXPERTS, limits
        ),
        lambda: groups.exchange.all_reduce(x),
        lambda: operators.experts.dispatch(x[:, ::2], small, share, ranks, EXPERTS, limits),
    ]
    reported = []
    for each in tries:
        try:
            each()
            reported.append("")
        except ContractError as error:
            reported.append(str(error))
    return reported


def test_what_an_exchange_does_not_take_is_refused(npu: EmulatedNpu, tmp_path) -> None:
    wanted = [
        "expert_ids must be 0 to 5",
        "no group is called 'nobody'",
        "the group has this one as",
        "200 tokens a rank need [0-9]+ MB of the group's buffer, it has 32",
        "expand_x must be the 24 rows of the exchange",
        "nothing else may use it",
        "x must be contiguous",
    ]
    for reported in together(2, tmp_path, refuse):
        assert isinstance(reported, list), reported
        for said, pattern in zip(reported, wanted, strict=True):
            assert re.search(pattern, said), (said, pattern)


@pytest.mark.parametrize(
    ("limits", "size", "why"),
    [
        (A3, (256, 7168, 8, 16, 256), ""),
        (A3, (257, 7168, 8, 16, 256), "1 to 256 tokens at once, not 257"),
        (A3, (0, 7168, 8, 16, 256), "not 0"),
        (A3, (8, 1023, 8, 16, 256), "1024 to 8192 wide, not 1023"),
        (A3, (8, 8193, 8, 16, 256), "not 8193"),
        (A3, (8, 7168, 13, 16, 256), "1 to 12 experts, not 13"),
        (A3, (8, 7168, 8, 769, 7690), "769 ranks cannot"),
        (A3, (8, 7168, 8, 16, 2064), "2048 at most"),
        (A2, (8, 1000, 8, 16, 256), "32 to 7168 wide, a multiple of 32, not 1000"),
        (A2, (8, 7168, 16, 16, 256), ""),
        (A2, (8, 7168, 8, 12, 252), "12 ranks cannot"),
        (A2, (8, 7168, 8, 16, 250), "250 experts are not the same number"),
    ],
)
def test_the_limits_of_a_chip(limits: Dispatch, size: tuple, why: str) -> None:
    assert why in limits.obstacle(*size)
    assert bool(why) == bool(limits.obstacle(*size))


def test_a_chip_is_known_by_its_name() -> None:
    assert (dispatch_of("Ascend910B3"), dispatch_of("Ascend910_9382")) == (A2, A3)


@pytest.mark.parametrize(("soc", "limits"), [("A2", A2), ("A3", A3)])
def test_the_buffer_is_what_the_launcher_computes(soc: str, limits: Dispatch) -> None:
    model = LaunchModel(name="", experts=256, experts_per_token=8, hidden=7168)
    for tokens, ranks in ((24, 16), (8, 32), (256, 64)):
        size = (tokens, 7168, 8, ranks, 256)
        assert limits.buffer_bytes(*size) == launched(soc, tokens, ranks, model)
    assert A3.buffer_bytes(24, 7168, 8, 16, 256) // MIB == 179  # of the 200 of the install page
