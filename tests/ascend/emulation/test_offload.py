"""Weights in memory of the host, streamed to an emulated NPU: what it says is bit for bit what it
says with all of them on the device, and less of the device is taken."""

import gc
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from banyan.platform import open_platform
from banyan.platform.accelerator import DeviceSideStream
from banyan.runner import weight_update as weights
from banyan.runner.offload import OffloadedBlocks, _HostBlock, _parts_of, _Prefetcher
from tests.ascend.emulation import test_drafts
from tests.ascend.emulation.device import EmulatedNpu
from tests.ascend.emulation.test_quantised import MADE
from tests.models.families import tiny
from tests.models.quantised_checkpoints import rewrite_weights
from tests.support.emulated_ranks import IN_ALL, SIZES, start

LAYERS, LAYER_BYTES = 6, 2 * (4 * 128 * 128 + 3 * 128 * 512)
"""Of the model below: what is multiplied with, in 16 bits."""
SHAPE = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 16, "num_attention_heads": 8}
IN_PROCESS = {"engine_mode": "inprocess", "cuda_graph_bs": [1, 2]}
LENGTHS, TOKENS = (140, 40, 5), (4, 9, 14)
HALF = {"offload_group_size": 2}


def answers(engine: Engine) -> list[tuple]:
    """Of prompts that end one after another: steps of three rows are launched anew."""
    ids = [[(7 * i * i + 3 * i + n) % 97 for i in range(n)] for n in LENGTHS]
    params = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in TOKENS]
    found = engine.generate(input_ids=ids, sampling_params=params, return_logprob=True)
    return [(f["output_ids"], f["meta_info"]["output_token_logprobs"]) for f in found]


def held() -> int:
    gc.collect()
    return torch.npu.memory_reserved()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offload")
    heads = {"num_key_value_heads": 8, "max_position_embeddings": 256}
    tiny("qwen3", folder, num_hidden_layers=LAYERS, **SHAPE, **heads)
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, npu: EmulatedNpu) -> tuple[list[tuple], int]:
    """What the device says that has all weights, and the bytes that are taken of it."""
    before = held()
    with start(model, **IN_PROCESS) as engine:
        return answers(engine), held() - before


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[OffloadedBlocks]:
    """Those of the models that are loaded."""
    found = list[OffloadedBlocks]()

    class Seen(OffloadedBlocks):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)
            found.append(self)

    monkeypatch.setattr(weights, "OffloadedBlocks", Seen)
    return found


def buffers(blocks: OffloadedBlocks) -> set[int]:
    """Where the weights of all blocks lie that are streamed."""
    away = blocks._away.values()
    return {view.untyped_storage().data_ptr() for one in away for view, *_ in one._views}


def test_the_device_gives_up_what_was_asked_and_says_the_same(
    npu: EmulatedNpu, model: Path, whole: tuple[list[tuple], int]
) -> None:
    said, taken = whole
    asked = 2 * LAYER_BYTES
    before = held()
    with start(model, **IN_PROCESS, cpu_offload_gb=asked / (1 << 30)) as engine:
        assert answers(engine) == said
        given_up = taken - (held() - before)
    assert asked <= given_up <= asked + LAYER_BYTES


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=IN_ALL), pytest.param(1, marks=IN_ALL), 2])
def test_the_last_layers_of_each_group_come_through_one_buffer_more_than_are_ahead(
    npu: EmulatedNpu, model: Path, whole: tuple[list[tuple], int], opened, ahead: int
) -> None:
    flags = {"offload_group_size": 3, "offload_num_in_group": 2, "offload_prefetch_step": ahead}
    with start(model, **IN_PROCESS, **flags) as engine:
        assert answers(engine) == whole[0]
        (blocks,) = opened
        assert sorted(blocks._away) == [1, 2, 4, 5]
        assert len(buffers(blocks)) == ahead + 1


class Scene:
    """Blocks of one matrix each, streamed through two buffers."""

    def __init__(self, npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BANYAN_NPU", "tests.ascend.emulation")
        self.platform = open_platform("npu")
        self.platform.open(0, 1)
        self.blocks = [nn.Linear(16, 16, bias=False, device="npu") for _ in range(5)]
        self.matrices = [block.weight.detach().cpu() for block in self.blocks]
        parts = [_parts_of([block.weight.data]) for block in self.blocks]
        for block, part in zip(self.blocks, parts, strict=True):
            block.weight = nn.Parameter(part[0].views[0], requires_grad=False)
            part[0].views[:] = [block.weight]
        away = [_HostBlock(part, self.platform) for part in parts]
        slots = [torch.empty(away[0].size, dtype=torch.uint8, device="npu") for _ in range(2)]
        for at, one in enumerate(away):
            one.use(slots[at % 2])
        _Prefetcher(away, slots, self.platform.side_stream()).hang(self.blocks[0], self.blocks)

    @torch.inference_mode()
    def run(self, passes: int = 2) -> None:
        for _ in range(passes):
            with self.platform.stream():
                x = wanted = torch.ones(1, 16)
                x = x.to("npu")
                for block, matrix in zip(self.blocks, self.matrices, strict=True):
                    x, wanted = block(x), wanted @ matrix.T
                assert torch.allclose(x.cpu(), wanted, atol=1e-5)


def test_blocks_that_come_in_their_turn_are_no_race(npu: EmulatedNpu, monkeypatch) -> None:
    Scene(npu, monkeypatch).run()
    assert npu.races() == []


def _does_not_wait(side: DeviceSideStream, work, after: object) -> object:
    with side._library.stream(side._stream):
        work()
        return side.record_event()


PLANTED = {
    "a block that does not wait for its weights": (
        *(_Prefetcher, "_enter", lambda turns, number, *_: None),
        "does not wait for a copy from the host",
    ),
    "a copy that does not wait for who reads the buffer": (
        *(DeviceSideStream, "run", _does_not_wait),
        "a copy from the host on stream",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_wait_that_is_missing_is_found(npu: EmulatedNpu, monkeypatch, races, fault: str) -> None:
    where, name, planted, reported = PLANTED[fault]
    with monkeypatch.context() as patch:
        patch.setattr(where, name, planted)
        Scene(npu, monkeypatch).run()
    assert any(reported in race for race in races())


def test_buffers_that_save_nothing_are_refused(npu: EmulatedNpu, model: Path) -> None:
    reported = "1 of this rank's 6 layers would lie in memory of the host.*nothing is saved"
    flags = {"offload_group_size": LAYERS, "disable_cuda_graph": True}
    with pytest.raises(BanyanError, match=reported), start(model, **IN_PROCESS | flags):
        pass


def test_two_ways_to_say_which_layers_are_refused(model: Path) -> None:
    with pytest.raises(
        BanyanError, match="--cpu-offload-gb 1 cannot be combined with --offload-group-size 2"
    ):
        Engine(str(model), device="npu", cpu_offload_gb=1, **HALF)
    with pytest.raises(
        BanyanError, match="--offload-num-in-group 3 exceeds --offload-group-size 2"
    ):
        Engine(str(model), device="npu", offload_num_in_group=3, **HALF)


def test_what_is_not_streamed_is_refused(npu: EmulatedNpu, model: Path) -> None:
    reported = "layers of Qwen3ForCausalLM cannot be offloaded, only of decoders"
    flags = {"model_impl": "transformers", "disable_cuda_graph": True}
    with pytest.raises(BanyanError, match=reported), start(model, **IN_PROCESS | flags | HALF):
        pass


def test_other_weights_come_through_buffers_of_their_own(
    npu: EmulatedNpu, model: Path, tmp_path: Path
) -> None:
    """A checkpoint that comes at run time, and graphs of its addresses."""
    other = shutil.copytree(model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    changed = {name: -tensor for name, tensor in tensors.items() if "down_proj" in name}
    save_file(tensors | changed, other / "model.safetensors", metadata={"format": "pt"})
    with start(other, **IN_PROCESS) as engine:
        wanted = answers(engine)
    with start(model, **IN_PROCESS, **HALF) as engine:
        assert answers(engine) != wanted
        before = held()
        assert engine.update_weights_from_disk(str(other))[0]
        assert answers(engine) == wanted
        assert held() - before < LAYER_BYTES


def same(folder: Path, **flags: object) -> None:
    """What a model says with half of its layers streamed is what it says without."""
    found = []
    for offload in ({}, HALF):
        with start(folder, **{**IN_PROCESS, **flags, **offload}) as engine:
            found.append(answers(engine))
    assert found[0] == found[1]


STEPS = [pytest.param({}, id="captured"), pytest.param({"disable_cuda_graph": True}, id="eager")]
LAYOUTS = {
    "tp": ("qwen3", {"tp_size": 2}),
    "pp": ("qwen3", {"pp_size": 2}),
    "ep": ("qwen3 moe", {"tp_size": 2, "ep_size": 2}),
    "cp": ("qwen3", {"tp_size": 2, "attn_cp_size": 2}),
    "dp": ("qwen3 moe", {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}),
}


@IN_ALL
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("variant", ["qwen3 moe", "gpt-oss", "deepseek v3"])
def test_experts_and_latents_are_streamed(npu, tmp_path: Path, variant: str, steps) -> None:
    sizes = {"num_hidden_layers": LAYERS, "max_position_embeddings": 256}
    tiny(variant, tmp_path, **sizes, **SIZES[variant])
    same(tmp_path, **steps)


@IN_ALL
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_streams_its_own_weights(npu, tmp_path: Path, layout: str) -> None:
    variant, flags = LAYOUTS[layout]
    sizes = {"num_hidden_layers": 2 * LAYERS, "max_position_embeddings": 256}
    tiny(variant, tmp_path, **sizes, **SIZES[variant])
    same(tmp_path, engine_mode="normal", **flags)


@IN_ALL
@pytest.mark.parametrize("name", [name for name in MADE if name.startswith("modelslim")])
def test_weights_of_8_bits_are_streamed(npu, tmp_path: Path, name: str) -> None:
    """In the order of their numbers: the device's own form is nothing that a copy keeps."""
    sizes = {"num_hidden_layers": LAYERS, "max_position_embeddings": 256}
    tiny("qwen3", tmp_path, **sizes, hidden_size=128, intermediate_size=512, head_dim=32)
    rewrite_weights(tmp_path, MADE[name])
    same(tmp_path, dtype="bfloat16")


@IN_ALL
@pytest.mark.parametrize("drafter", ["NGRAM128", "NEXTN", "EAGLE"])
def test_drafts_are_verified_by_weights_that_are_streamed(npu, tmp_path: Path, drafter) -> None:
    named, found = test_drafts.made(drafter, tmp_path), []
    for offload in ({}, {"offload_group_size": 1, "offload_prefetch_step": 0}):
        with start(tmp_path, **IN_PROCESS, **named, **offload) as engine:
            found.append([each["output_ids"] for each in test_drafts.answers(engine)])
    assert found[0] == found[1]
