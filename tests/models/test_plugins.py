"""A family and a format of quantised checkpoints that live in somebody else's package."""

import subprocess
import sys
from pathlib import Path

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
PROGRAM = """
import sys, torch
import banyan
from banyan.config.checkpoint import read_card
from banyan.layers.build import Build
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind

model = load_model(read_card(sys.argv[1]), Build(bind("cpu", torch.device("cpu"), torch.float32,
    frozenset(), 8)))
print(model.logits(torch.eye(model.card.hidden_size)).double().sum().item())
"""


def install(folder: Path) -> None:
    """As pip leaves a package: a module, and its metadata beside it."""
    (folder / "mine_of_others.py").write_text(PACKAGE)
    metadata = folder / "mine_of_others-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mine-of-others\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)


def total_of_logits(checkpoint: Path, site: Path) -> float:
    paths = ":".join([str(site), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(checkpoint)],
        env={"PYTHONPATH": paths, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout)


def test_a_family_and_a_format_of_another_package_are_served(tmp_path):
    from safetensors.torch import load_file, save_file

    checkpoint, site = tmp_path / "model", tmp_path / "site"
    site.mkdir()
    install(site)
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
