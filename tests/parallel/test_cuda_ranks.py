"""Two ranks that share one GPU, whose collectives are the all-reduce over shared memory alone: they
answer as one rank does, with the sums inside captured graphs. In Triton's interpreter the host is
the device, and the ranks map files."""

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from banyan.model_config.checkpoint import read_model_config
from banyan.ops.cuda.all_reduce import PeerAllReduce, Sizes, open_peers
from banyan.ops.cuda.needs import TYPES
from banyan.parallel.collectives import Rendezvous
from banyan.parallel.groups import ALONE, Group, Groups
from banyan.parallel.process_group import GroupCollectives, dist
from banyan.platform.base import Platform
from banyan.platform.cuda import CudaPlatform
from tests.ops.triton_device import ABSENCE, IS_INTERPRETED
from tests.parallel.ranks import together
from tests.runner.conftest import build_runner
from tests.support.captured import Elsewhere
from tests.support.runner_driver import Driver, Request, greedy

pytestmark = pytest.mark.skipif(bool(ABSENCE), reason=ABSENCE)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
MODELS = {"Llama": {}, "Qwen3Moe": EXPERTS}
"""Models of transformers, of any release; each rank holds whole experts."""
LENGTHS = (1, 5, 19)
FILES = Sizes(programs=2, block=256, warps=1, slot_bytes=1 << 15, at_once=((8, 4096),))


class OneGpu(GroupCollectives):
    """Sums of the shared memory: a gathered tensor is a sum of what is zero on the other ranks."""

    def __init__(self, rendezvous: Rendezvous, peers: PeerAllReduce) -> None:
        super().__init__(None, rendezvous)
        self._peers = peers

    def all_reduce(self, x: Tensor) -> None:
        if self._peers.takes(x):
            self._peers.add(x)
        else:
            super().all_reduce(x)

    def broadcast(self, x: Tensor, source: int) -> None:
        x.copy_(self._gathered(x)[source])

    def _parts(self, x: Tensor) -> list[Tensor]:
        return list(self._gathered(x))

    def _gathered(self, x: Tensor) -> Tensor:
        if x.dtype not in TYPES:
            octets = self._gathered(x.contiguous().view(torch.uint8).float())
            return octets.to(torch.uint8).view(x.dtype)
        out = x.new_zeros((self._size, *x.shape))
        out[self._rank] = x
        for piece in out.view(-1).split(self._peers.sizes.slot_bytes // x.itemsize):
            self._peers.add(piece)
        return out


def open_groups_of(rank: int, size: int, address: str) -> Group:
    folder = Path(address.removeprefix("file://")).parent
    rendezvous = Rendezvous(rank, size, address, 60.0)
    if IS_INTERPRETED:
        memory = [
            torch.from_file(
                str(folder / f"memory{r}"), shared=True, size=FILES.all_bytes, dtype=torch.uint8
            )
            for r in range(size)
        ]
        addresses = [part.data_ptr() for part in memory]
        peers: PeerAllReduce | str = PeerAllReduce(rank, addresses, torch.device("cpu"), FILES)
    else:
        store = dist.FileStore(str(folder / "store"), size)
        store.set_timeout(timedelta(seconds=60))

        def publish(name: str, mine: bytes) -> list[bytes]:
            store.set(f"{name}.{rank}", mine)
            return [store.get(f"{name}.{each}") for each in range(size)]

        peers = open_peers(publish, rank, is_checked=True)
    assert isinstance(peers, PeerAllReduce), peers
    found = OneGpu(rendezvous, peers)
    found.memory = memory if IS_INTERPRETED else None  # keeps the files mapped
    return Group(rank, size, found)


def answer(rank: int, size: int, address: str, folders: dict[str, Path]) -> list[tuple]:
    platform: Platform = Elsewhere() if IS_INTERPRETED else CudaPlatform()
    platform.open(0, 1)
    group = Group() if size == 1 else open_groups_of(rank, size, address)
    found = []
    for name, experts in MODELS.items():
        groups = ALONE
        if size > 1:
            groups = Groups.with_experts_apart(group) if experts else Groups.of(group)
        model_config = read_model_config(str(folders[name]))
        runner = build_runner(model_config, groups, platform=platform)
        asked = [
            Request([(7 * i * i + 3 * i + n) % 97 for i in range(n)], greedy(6), score_from=0)
            for n in LENGTHS
        ]
        Driver(runner).run(asked, chunk=8)
        scores = [[r.scores[p] for p in sorted(r.scores)] for r in asked]
        found.append((runner.forward.how, [r.output for r in asked], scores))
    return found


def test_two_ranks_of_one_gpu_answer_as_one_does(tmp_path: Path) -> None:
    torch.manual_seed(3)
    folders = {name: tmp_path / name for name in MODELS}
    for name, folder in folders.items():
        config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    for rank in range(2):
        (tmp_path / f"memory{rank}").write_bytes(bytes(FILES.all_bytes))
    (alone,) = together(1, tmp_path, answer, folders)
    both = together(2, tmp_path, answer, folders)
    for rank, found in enumerate(both):
        assert isinstance(found, list) and isinstance(alone, list), (found, alone)
        for (how, tokens, scores), (same, expected, close) in zip(found, alone, strict=True):
            assert how == same == "captured"
            assert tokens == expected
            for mine, one in zip(scores, close, strict=True) if rank == 0 else ():
                assert np.allclose(mine, one, rtol=0, atol=2e-4)
