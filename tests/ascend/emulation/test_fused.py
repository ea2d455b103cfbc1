"""Blocks of experts by one operator, of ranks on devices of an emulated NPU: what comes back, again
when it is a graph, and what is refused."""

import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.ascend.driver import open_deep_ep
from banyan.ascend.launch.expert_rules import buffer_bytes as launched
from banyan.ascend.launch.facts import LaunchModel
from banyan.ascend.ops.contracts import ContractError
from banyan.ascend.ops.experts import as_bits, interleaved
from banyan.ascend.ops.operators import Fuser
from banyan.ascend.ops.product_contracts import FUSED, MIB
from banyan.ascend.ops.toolkit import NpuToolkit
from banyan.ascend.platform import NpuPlatform
from banyan.base.errors import BanyanError, ConfigError
from banyan.config.cli import parse
from banyan.config.env import read_environment
from banyan.config.prepare import prepare
from banyan.engine.model_loader import check_fused_dispatch, fused_mode
from banyan.layers.build import Build
from banyan.moe.layer import ExpertExchange
from banyan.moe.rules import LIMIT
from banyan.ops import reference
from banyan.ops.activation_quant import DYNAMIC, Rounding
from banyan.ops.bind import bind, open_toolkit
from banyan.ops.experts_api import Ranks, StoredExperts
from banyan.ops.stored import StoredWeight
from banyan.parallel.groups import GroupsConfig, open_groups
from tests.ascend.emulation.device import EmulatedNpu, install
from tests.ascend.emulation.exchanges import Tokens, how_far
from tests.models.families import tiny
from tests.models.quantised import FORMS
from tests.models.quantised_checkpoints import rewrite_weights
from tests.parallel.ranks import together
from tests.support.emulated import compare
from tests.support.emulated_ranks import IN_ALL, JOINED, answers, start

SOC = os.environ.get("BANYAN_NPU_SOC", "A3")
ON_A3 = pytest.mark.skipif(SOC == "A2", reason="an A2 has no such operator")
EXPERTS, PER_TOKEN, DIM, INNER = 4, 2, 512, 512
NAME = "SGLANG_NPU_FUSED_MOE_MODE"
MOST = 3
"""Tokens of a rank in a call."""


def stored(x: torch.Tensor) -> StoredWeight:
    scale = x.abs().amax(1) / 127
    numbers = (x / scale.unsqueeze(1)).round().to(torch.int8)
    return StoredWeight(DYNAMIC, tuple(x.shape), Rounding(numbers, scale).raw)


def weights(rank: int | None = None) -> StoredExperts:
    """Of a rank of two, or all of them."""
    draw = torch.Generator().manual_seed(3)

    def matrices(*shape: int) -> tuple[StoredWeight, ...]:
        each = (torch.randn(shape, generator=draw) / shape[1] ** 0.5 for _ in range(EXPERTS))
        return tuple(stored(x) for x in each)

    parts = (matrices(INNER, DIM), matrices(INNER, DIM), matrices(DIM, INNER))
    if rank is None:
        return StoredExperts(0, *parts, "silu", total=EXPERTS)
    mine = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
    gate, up, down = (part[mine] for part in parts)
    return StoredExperts(mine.start, gate, up, down, "silu", total=EXPERTS)


tokens_of = Tokens(DIM, EXPERTS, PER_TOKEN, torch.bfloat16)


def opened(rank: int, address: str, mode: int):
    """The platform, the ops and the groups of a rank of two."""
    os.environ |= {"BANYAN_NPU": "tests.ascend.emulation", "BANYAN_NPU_CHECKS": "1"}
    install("A3")
    platform = NpuPlatform()
    device = platform.open(rank, 1)
    toolkit = open_toolkit("npu", 1, {"fuseep-mode": str(mode)})
    kinds = (platform.traits.features, 64)
    ops = bind("npu", device, torch.bfloat16, *kinds, toolkit=toolkit, page_size=128)
    groups = open_groups(
        GroupsConfig(rank, 2, address, ("hccl",), 60, are_experts_apart=True, has_exchange=True)
    )
    return platform, ops, groups


def fused(rank: int, size: int, address: str, mode: int) -> list[float]:
    """Of each of several steps: how far the rows of this rank are from what they should be."""
    platform, ops, groups = opened(rank, address, mode)
    packed = ops.pack_experts(weights(rank))
    dense = reference.pack_experts(weights(), torch.float32, torch.device("cpu"))
    device, ranks = torch.device("npu", rank), groups.exchange.ranks
    found = how_far(platform, packed, dense, ranks, tokens_of)
    build = Build(ops, groups, sends_rows=True, exchanged=MOST, is_fused=True, dtype=torch.bfloat16)
    exchange, given = ExpertExchange.of(build), tokens_of(0, 9, 5)
    assert exchange is not None and exchange.holds(2 * MOST + 3)
    wanted = dense(given[0].float(), *given[1:])
    out = exchange(packed, *(part.to(device) for part in given))  # 5 tokens a rank, in two calls
    found.append(float((out.cpu().float() - wanted).abs().max()))
    return found


@ON_A3
@pytest.mark.parametrize("mode", [1, pytest.param(2, marks=IN_ALL)])
def test_what_comes_back_is_the_sum_over_the_experts(npu: EmulatedNpu, tmp_path, mode) -> None:
    for found in together(2, tmp_path, fused, mode):
        assert isinstance(found, list), found
        assert len(found) == 6 and max(found) < 0.15  # rounded twice


def refuse(rank: int, size: int, address: str) -> list[str]:
    """What is said of calls that cannot be; both ranks try the same."""
    os.environ["DEEPEP_HCCL_BUFFSIZE"] = "2"
    _, ops, groups = opened(rank, address, 1)
    ranks, device = groups.exchange.ranks, torch.device("npu", rank)
    packed = ops.pack_experts(weights(rank))
    x, ids, share = (part.to(device) for part in tokens_of(rank, 4, 0))
    first, second = packed._gate_up, packed._down
    call = Fuser(open_deep_ep(), 1, FUSED[0], False)
    plain = (first[0].clone(), first[1])
    many = [part.repeat(40, 1) for part in (x, ids, share)]
    far = Ranks("nobody", rank, 2)
    buffer = call._buffer(ranks)
    small = {"num_max_dispatch_tokens_per_rank": 3, "num_experts": EXPERTS}
    tries = [
        lambda: call(x, ids + EXPERTS, share, first, second, ranks, EXPERTS),
        lambda: call(x, ids, share, first, second, ranks, EXPERTS + 2),
        lambda: call(x, ids, share, plain, second, ranks, EXPERTS),
        lambda: call(*many, first, second, ranks, EXPERTS),
        lambda: call(x, ids, share, first, second, far, EXPERTS),
        lambda: buffer.fused_deep_moe(x, ids, share, *first, *second, **small),
        lambda: buffer.fused_deep_moe(x, ids, share, *first, *second, 4, EXPERTS, quant_mode=0),
        lambda: call(x.t().contiguous().t(), ids, share, first, second, ranks, EXPERTS),
    ]
    reported = []
    for each in tries:
        try:
            each()
            reported.append("")
        except ContractError as error:
            reported.append(str(error))
    return reported


@ON_A3
def test_what_the_operators_do_not_take_is_refused(npu: EmulatedNpu, tmp_path) -> None:
    wanted = [
        "topk_idx must be 0 to 3",
        "2 experts are here, 6 of all make 3",
        r"gmm1_permuted_weight must have the fractal form \(NZ\)",
        "160 tokens a rank need [0-9]+ MB of the group's buffer, it has 2$",
        "no group is called 'nobody'",
        "num_max_dispatch_tokens_per_rank is 3, a rank gives 4",
        "quant_mode is 1, not 0",
        "x must be contiguous",
    ]
    for reported in together(2, tmp_path, refuse):
        assert isinstance(reported, list), reported
        for said, pattern in zip(reported, wanted, strict=True):
            assert re.search(pattern, said), (said, pattern)


@pytest.mark.parametrize(
    ("mode", "size", "why"),
    [
        (1, (256, 7168, 4096, 8, 16, 256), ""),
        (1, (257, 7168, 4096, 8, 16, 256), "gives 1 to 256 tokens at once, not 257"),
        (1, (8, 480, 4096, 8, 16, 256), "rows are 512 to 7168 wide, a multiple of 32, not 480"),
        (1, (8, 7168, 896, 8, 16, 256), "gates and ups together are 1024 to 6144 wide.* not 896"),
        (1, (8, 7168, 1088, 8, 16, 256), "a multiple of 128, not 1088"),
        (1, (8, 7168, 4096, 13, 16, 256), "1 to 12 experts, not 13"),
        (1, (8, 7168, 4096, 8, 1, 256), "1 ranks cannot exchange"),
        (1, (8, 7168, 4096, 8, 16, 528), "512 at most"),
        (1, (8, 7168, 4096, 8, 16, 250), "250 experts are not the same number"),
        (2, (1024, 7168, 1088, 16, 16, 256), ""),
        (2, (1025, 7168, 4096, 8, 16, 256), "1 to 1024 tokens at once"),
    ],
)
def test_the_limits_of_an_operator(mode: int, size: tuple, why: str) -> None:
    found = FUSED[mode - 1].obstacle(*size)
    assert re.search(why, found) and bool(why) == bool(found)


def test_an_operator_of_8_bits_needs_less_of_the_buffer() -> None:
    first, second = (limits.buffer_bytes(24, 7168, 8, 16, 256) for limits in FUSED)
    assert (first // MIB, second) == (179, 3 * 24 * 8 * 7168 + 10 * MIB)


def test_the_buffer_is_what_the_launcher_computes() -> None:
    model = LaunchModel(name="", experts=256, experts_per_token=8, hidden=7168)
    for mode, (tokens, ranks) in ((1, (24, 16)), (2, (1000, 32))):
        found = FUSED[mode - 1].buffer_bytes(tokens, 7168, 8, ranks, 256)
        assert found == launched("A3", tokens, ranks, model, mode)


def test_a_first_weight_has_gates_and_ups_in_turns() -> None:
    numbers = torch.arange(8).view(1, 8, 1).expand(1, 8, 3)
    assert interleaved(numbers, 2)[0, :, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert interleaved(numbers[..., 0], 4)[0].tolist() == list(range(8))
    assert as_bits(torch.tensor([1.0, -2.0])).tolist() == [0x3F800000, -0x40000000]


SIZES = {"head_dim": 16, "num_experts": 8, "hidden_size": DIM, "moe_intermediate_size": INNER}
SIZES |= {"num_hidden_layers": 2, "max_position_embeddings": 256, "weights": 0.06}
SENT = {"moe_a2a_backend": "ascend_fuseep", "dtype": "bfloat16", "quantization": "modelslim"}
NEAR = 0.1
"""Numbers of bfloat16, rounded to 8 bits twice."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    tiny("qwen3 moe", folder, **SIZES)
    rewrite_weights(folder, FORMS["modelslim, dynamic"])
    return folder


@pytest.fixture(scope="module")
def wanted(model, tmp_path_factory) -> list[dict]:
    """What the weights that are meant say on one device, with all of their bits."""
    folder = tmp_path_factory.mktemp("meant")
    tiny("qwen3 moe", folder, **SIZES)
    meant = rewrite_weights(folder, FORMS["modelslim, dynamic"])
    (folder / "quant_model_description.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    tensors = {k: v for k, v in tensors.items() if not k.endswith(("_scale", "_offset"))}
    save_file(tensors | meant, folder / "model.safetensors", {"format": "pt"})
    with start(folder, dtype="float32", cpu_activations="fp32", device="cpu") as engine:
        return answers(engine)


LAYOUTS = {
    "ep, the first": (1, {"tp_size": 2}),
    "ep, the second": (2, {"tp_size": 2}),
    "ep, the first, eager": (1, {"tp_size": 2, "disable_cuda_graph": True}),
    "dp, the first": (1, JOINED),
    "dp of two ranks, the second": (2, JOINED | {"tp_size": 4}),
    "ep, several rows at once": (2, {"tp_size": 2, "deepep_mode": "low_latency"}),
}


@ON_A3
@IN_ALL
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_operator_says_what_several_say(npu, model, wanted, monkeypatch, layout: str) -> None:
    mode, flags = LAYOUTS[layout]
    monkeypatch.setenv(NAME, str(mode))
    with start(model, **SENT, **flags) as engine:
        assert compare(answers(engine), wanted, NEAR) >= 8
        assert engine.get_server_info()["moe_a2a_backend"] == "ascend_fuseep"


@ON_A3
@pytest.mark.parametrize(
    ("mode", "tokens", "why"),
    [("1", "256", ""), ("1", "300", "takes at most 256 tokens of a rank"), ("2", "300", "")],
)
def test_a_variable_says_which_operator_it_is(npu, model, monkeypatch, mode, tokens, why) -> None:
    """By what it takes."""
    for name, value in ((NAME, mode), (LIMIT, tokens), ("BANYAN_NPU", "tests.ascend.emulation")):
        monkeypatch.setenv(name, value)
    given = read_environment()
    flags = ("--model-path", str(model), "--device", "npu", "--tp", "2")
    sent = (word for name, value in SENT.items() for word in (f"--{name.replace('_', '-')}", value))
    words = (*flags, *sent)
    if why:
        with pytest.raises(ConfigError, match=why):
            prepare(parse(words, given), given)
        return
    config, model_config = prepare(parse(words, given), given)
    check_fused_dispatch(config, model_config, NpuPlatform().traits)
    wishes = {"fuseep-mode": str(fused_mode(config))}
    toolkit = open_toolkit("npu", 1, wishes)
    assert isinstance(toolkit, NpuToolkit) and toolkit.fuser.mode == int(mode)


REFUSED = {
    "on cpu: only Ascend A3s have": ({"device": "cpu", "dtype": "float32"}, {}),
    "rows are 512 to 7168 wide, a multiple of 32, not 48": ({}, {"hidden_size": 48}),
    "gates and ups together are 1024 to 6144 wide": ({}, {"moe_intermediate_size": 64}),
    "SGLANG_DEEPEP_NUM.*=300: .* takes at most 256 tokens of a rank": ({"tokens": 300}, {}),
    "experts that move or have copies": ({"ep_num_redundant_experts": 2}, {}),
    "computes in bfloat16, --dtype is float16": ({"dtype": "float16"}, {}),
    "in a form of their own": ({"cpu_offload_gb": 1}, {}),
    "modelslim's W8A8_DYNAMIC.*this model's are F32": ({}, {"is_plain": True}),
}


@ON_A3
@IN_ALL
@pytest.mark.parametrize("why", REFUSED)
def test_where_it_cannot_be_it_is_refused(npu, tmp_path, monkeypatch, why: str) -> None:
    flags, sizes = REFUSED[why]
    sizes = {"num_hidden_layers": 1, **{k: v for k, v in sizes.items() if k != "is_plain"}}
    tiny("qwen3 moe", tmp_path, **SIZES | sizes)
    if not REFUSED[why][1].get("is_plain"):
        rewrite_weights(tmp_path, FORMS["modelslim, dynamic"])
    if "tokens" in flags:
        name = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
        monkeypatch.setenv(name, str(flags["tokens"]))
    flags = {k: v for k, v in flags.items() if k != "tokens"}
    given = {"tp_size": 2, **SENT, **flags}
    if REFUSED[why][1].get("is_plain"):
        del given["quantization"]
    with pytest.raises(BanyanError, match=why), start(tmp_path, **given):
        pass


@pytest.mark.skipif(SOC == "A3", reason="an A3 has such operators")
def test_an_a2_has_no_such_operator(npu, model) -> None:
    why = "--moe-a2a-backend ascend_fuseep: A2 has no fused dispatch"
    with pytest.raises(BanyanError, match=why), start(model, tp_size=2, **SENT):
        pass
