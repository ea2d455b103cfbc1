"""Several ranks on devices of an emulated NPU of their own, against one rank on the CPU."""

import pytest
import torch
import torch.distributed

from banyan.ascend.driver import open_driver
from banyan.ascend.ops.contracts import ContractError
from banyan.base.errors import BanyanError, ConfigError
from tests.ascend.emulation.device import EmulatedNpu
from tests.ascend.emulation.groups import EXCHANGES_LOG, SCALE, ProcessGroup
from tests.ascend.emulation.test_drafts import answers as repeating
from tests.ascend.emulation.test_drafts import made
from tests.models.families import tiny
from tests.support.emulated import NEAR, compare
from tests.support.emulated_ranks import (
    CAPTURED,
    EAGER,
    IN_ALL,
    JOINED,
    SIZES,
    TOKENS,
    answers,
    start,
)
from tests.system.serving import free_port

APART = JOINED | {"enable_dp_lm_head": True}
DIVIDED = {"tp_size": 2, "attn_cp_size": 2}
SENT = {"moe_a2a_backend": "deepep", "deepep_mode": "normal"}
AUTO = {"moe_a2a_backend": "deepep", "deepep_mode": "auto"}
AT_ONCE = AUTO | {"deepep_mode": "low_latency", "chunked_prefill_size": 128}
LAYOUTS = {
    "tp": ("qwen3", {"tp_size": 2}),
    "pp": ("qwen3", {"pp_size": 2}),
    "ep": ("qwen3 moe", {"tp_size": 2, "ep_size": 2}),
    "ep with biases": ("gpt-oss", {"tp_size": 2, "ep_size": 2}),
    "dp": ("qwen3 moe", JOINED),
    "ep, rows sent": ("qwen3 moe", {"tp_size": 2} | SENT),
    "dp, rows sent": ("qwen3 moe", JOINED | SENT),
    "dp of two ranks, rows sent": ("deepseek v3", JOINED | {"tp_size": 4} | SENT),
    "cp of an indexer, rows sent": ("deepseek v3.2", DIVIDED | SENT),
    "dp of two ranks, ep": ("deepseek v3", JOINED | {"tp_size": 4, "ep_size": 4}),
    "ep, rows at once": ("qwen3 moe wide", {"tp_size": 2} | AT_ONCE),
    "ep with biases, rows at once": ("gpt-oss wide", {"tp_size": 2} | AUTO),
    "dp of two ranks, rows at once": ("deepseek v3 wide", JOINED | {"tp_size": 4} | AUTO),
    "dp of an indexer, rows at once": ("deepseek v3.2 wide", JOINED | AUTO),
    "dp, heads apart": ("deepseek v3", JOINED | {"ep_size": 2, "enable_dp_lm_head": True}),
    "cp": ("qwen3", DIVIDED),
    "cp of latents": ("deepseek v3", DIVIDED | {"ep_size": 2}),
    "cp of an indexer": ("deepseek v3.2", DIVIDED | {"cp_strategy": "interleave"}),
}
IN_TEST = "ep"


def test_sums_are_the_library_s_own_where_that_is_asked(
    npu: EmulatedNpu, tmp_path, monkeypatch
) -> None:
    tiny("qwen3", tmp_path, max_position_embeddings=256)
    with start(tmp_path, device="cpu", dtype="float32", cpu_activations="fp32") as engine:
        wanted = answers(engine)
    monkeypatch.setenv(EXCHANGES_LOG, str(tmp_path / "exchanges"))
    with start(tmp_path, tp_size=2, disable_custom_all_reduce=True, **CAPTURED) as engine:
        assert compare(answers(engine), wanted, NEAR) >= len(TOKENS)
    assert "allreduce" in (tmp_path / "exchanges").read_text().split()


def test_ranks_that_meet_at_a_port_answer(npu: EmulatedNpu, tmp_path) -> None:
    tiny("qwen3", tmp_path, max_position_embeddings=256)
    with start(tmp_path, tp_size=2, nccl_port=free_port()) as engine:
        assert answers(engine)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == IN_TEST else IN_ALL) for name in LAYOUTS]
)
@pytest.mark.parametrize(
    "steps", [pytest.param(EAGER, marks=IN_ALL), CAPTURED], ids=["eager", "captured"]
)
def test_ranks_say_what_one_says_on_the_cpu(npu: EmulatedNpu, tmp_path, layout, steps) -> None:
    """With an indexer, what one says on such a device, and less near: which of two positions that
    are as good it chooses depends on the last bits of both."""
    variant, flags = LAYOUTS[layout]
    one, near = {"dtype": "float32", "cpu_activations": "fp32", "device": "cpu"}, NEAR
    if "index_head_dim" in SIZES[variant]:
        one, near = {}, 3 * NEAR
    sizes: dict = {"max_position_embeddings": 256, "num_hidden_layers": 4} | SIZES[variant]
    tiny(variant.removesuffix(" wide"), tmp_path, **sizes)
    with start(tmp_path, **one) as engine:
        wanted = answers(engine)
    with start(tmp_path, **flags, **steps) as engine:
        assert compare(answers(engine), wanted, near) >= len(TOKENS)


@IN_ALL
@pytest.mark.parametrize("layout", [{"tp_size": 2}, DIVIDED, APART], ids=["tp", "cp", "dp"])
@pytest.mark.parametrize("drafter", ["NEXTN", "NEXTN of an indexer", "NGRAM128"])
def test_ranks_verify_drafts_and_say_the_same(npu: EmulatedNpu, tmp_path, drafter, layout) -> None:
    named = made(drafter, tmp_path)
    with start(tmp_path, **CAPTURED) as engine:
        alone = [each["output_ids"] for each in repeating(engine)]
    with start(tmp_path, **CAPTURED, **named, **layout) as engine:
        found = repeating(engine)
    assert [each["output_ids"] for each in found] == alone
    assert sum(each["meta_info"]["spec_num_correct_drafts"] for each in found) > 0


@IN_ALL
def test_rows_that_go_at_once_verify_drafts_of_joined_replicas(npu: EmulatedNpu, tmp_path) -> None:
    tiny("deepseek v3", tmp_path, max_position_embeddings=256, **SIZES["deepseek v3 wide"])
    named = {"speculative_algorithm": "NGRAM", "disable_adaptive_drafts": True}
    with start(tmp_path, **CAPTURED) as engine:
        alone = repeating(engine)
    with start(tmp_path, **CAPTURED, **named, **JOINED | AUTO | {"tp_size": 4}) as engine:
        found = repeating(engine)
    assert compare(found, alone, NEAR) >= len(TOKENS)
    assert sum(each["meta_info"]["spec_num_correct_drafts"] for each in found) > 0


REFUSED_TOGETHER = {
    "--deepep-mode low_latency on npu: rows are .* wide.*, not 48": (
        *("qwen3 moe", {"tp_size": 2} | AT_ONCE),
    ),
    "--deepep-mode auto on npu: a rank sends 1 to 256 tokens at once, not 300; SGLANG_DEEPEP_NUM": (
        *("qwen3 moe wide", {"tp_size": 2, "tokens": 300} | AUTO),
    ),
    "--deepep-mode auto on npu: the shares of a divided step": ("deepseek v3", DIVIDED | AUTO),
    "--deepep-mode auto on npu: experts that move or have copies": (
        *("qwen3 moe wide", {"tp_size": 2, "ep_num_redundant_experts": 2} | AUTO),
    ),
}


@pytest.mark.parametrize(
    "why", [pytest.param(w, marks=IN_ALL if " auto on" in w else ()) for w in REFUSED_TOGETHER]
)
def test_what_ranks_do_not_do_on_a_device_is_refused(npu, tmp_path, monkeypatch, why: str) -> None:
    variant, flags = REFUSED_TOGETHER[why]
    sizes: dict = {"max_position_embeddings": 256, "num_hidden_layers": 2} | SIZES[variant]
    tiny(variant.removesuffix(" wide"), tmp_path, **sizes)
    if "tokens" in flags:
        name = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
        monkeypatch.setenv(name, str(flags["tokens"]))
    flags = {key: value for key, value in flags.items() if key != "tokens"}
    with pytest.raises(BanyanError, match=why), start(tmp_path, **flags):
        pass


def met(name: str = "", **variables: str) -> ProcessGroup:
    """A group of one rank."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"BANYAN_NPU": "tests.ascend.emulation", **variables}.items():
            patch.setenv(key, value)
        return open_driver().group(torch.distributed.HashStore(), 0, 1, 10.0, name)


@pytest.mark.parametrize("megabytes", ["", "64", "1200"])
def test_a_group_takes_buffers_of_the_size_that_was_asked_for(npu: EmulatedNpu, megabytes) -> None:
    before = torch.npu.memory_reserved()
    group = met(HCCL_BUFFSIZE=megabytes)
    taken = torch.npu.memory_reserved() - before
    assert group.size() == 1
    wanted = 2 * (int(megabytes or 200) << 20) / SCALE
    assert wanted <= taken <= wanted + 1024


@pytest.mark.parametrize("megabytes", ["0", "-5", "much", "1.5"])
def test_a_size_that_no_buffer_has_is_refused(npu: EmulatedNpu, megabytes: str) -> None:
    with pytest.raises(ConfigError, match=f"HCCL_BUFFSIZE={megabytes}: .* from 1 on"):
        met(HCCL_BUFFSIZE=megabytes)


REFUSED = {
    "must lie on the NPU": lambda group, x: group.broadcast(x.cpu(), 0),
    "there is no rank 1 of 1": lambda group, x: group.broadcast(x, 1),
    "there is no rank 2 of 1": lambda group, x: group.send([x], 2, 0),
    "1 are filled": lambda group, x: group.allgather([[x, x]], [x]),
    "one shape": lambda group, x: group.allgather([[x[:2]]], [x]),
    "must be 1 parts of 4 rows": lambda group, x: group.alltoall_base(x, x, [3], [4]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_a_collective_does_not_take_is_refused(npu: EmulatedNpu, why: str) -> None:
    with pytest.raises(ContractError, match=why):
        REFUSED[why](met(), torch.ones(4, 3, device="npu"))


def test_a_group_is_of_the_backend_that_torch_knows_by_its_name(npu: EmulatedNpu) -> None:
    backend = torch.distributed.Backend
    assert backend.default_device_backend_map["npu"] == backend.HCCL == "hccl"
    x = torch.ones(4, 3, device="npu")
    parts = [torch.zeros_like(x)]
    assert met("one").allgather([parts], [x]).wait()
    assert bool((parts[0] == 1).all())
