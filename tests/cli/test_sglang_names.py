"""The optional distribution with SGLang's module names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
    ("sglang.launch_server", ["serve"]),
    ("sglang.bench_serving", ["bench", "serving"]),
    ("sglang.bench_one_batch", ["bench", "batch"]),
    ("sglang.srt.disaggregation.launch_lb", ["lb"]),
    ("sglang_router.launch_router", ["router"]),
]


def python(*words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    folders = os.pathsep.join(filter(None, [str(ROOT / "compat"), str(ROOT), path]))
    return subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"PYTHONPATH": folders},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(("module", "verb"), PAIRS, ids=[module for module, _ in PAIRS])
def test_a_module_of_sglang_is_a_verb_of_banyan(module: str, verb: list[str]) -> None:
    theirs = python("-m", module, "--help")
    assert theirs.returncode == 0, theirs.stderr
    assert theirs.stdout == python("-m", "banyan", *verb, "--help").stdout != ""


def test_the_engine_is_ours_and_other_names_are_refused() -> None:
    done = python("-c", "import banyan, sglang as sgl; assert sgl.Engine is banyan.Engine")
    assert done.returncode == 0, done.stderr
    other = python("-c", "import sglang as sgl; sgl.function")
    assert "sglang.function is not served by Banyan" in other.stderr


@pytest.mark.parametrize("name", ["sglang", "sglang_router"])
def test_the_modules_refuse_to_load_where_the_real_ones_are_installed(
    name: str, tmp_path: Path
) -> None:
    info = tmp_path / f"{name}-0.5.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.5.9\n")
    for module in ("sglang.launch_server", "sglang_router.launch_router"):
        done = python("-m", module, "--help", path=str(tmp_path))
        assert done.returncode != 0 and "0.5.9" in done.stderr and "uninstall one" in done.stderr
