"""Every proof of a flag fails when the flag's effect is gone.

Each is run once more in a process of its own, where `without/sitecustomize.py` forgets what the
flag was given. A few quick ones here; `make test-proofs` sets PROOFS=all and takes some minutes.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from banyan.config.flags.table import CONFIG_FILE, CONFIG_FILE_PROOF, GROUPS
from banyan.config.variables import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = ROOT / "tests" / "proofs" / "without"
PROOFS = {CONFIG_FILE: CONFIG_FILE_PROOF}
PROOFS |= {flag.name: flag.proof for _, flags in GROUPS for flag in flags}
PROOFS |= {setting.name: setting.proof for setting in SETTINGS.values()}
QUICK = ("config", "scheduler", "memory")
"""Rooms whose proofs take about a second each."""
SAMPLE = 5


def is_quick(proof: str) -> bool:
    return proof.startswith(tuple(f"tests/{room}/" for room in QUICK))


quick = [name for name, proof in PROOFS.items() if is_quick(proof)]
NAMES = list(PROOFS) if os.environ.get("PROOFS") == "all" else quick[:: -(-len(quick) // SAMPLE)]


def outcomes(*proofs: str, without: str = "") -> tuple[dict[str, int], str]:
    """How many tests passed, failed, …, and what pytest printed."""
    environment = dict(os.environ)
    if without:
        path = [str(WITHOUT), environment.get("PYTHONPATH", "")]
        environment |= {"WITHOUT_FLAG": without, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *proofs]
    if without:
        command.append("-x")  # one failure is what is looked for
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [done.stderr]
    return {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", lines[-1])}, done.stdout


@pytest.fixture(scope="session")
def with_their_flags() -> None:
    """All of them pass as they are: one that fails anyway would prove nothing."""
    counts, text = outcomes(*dict.fromkeys(PROOFS[name] for name in NAMES))
    assert counts.get("passed") and not counts.keys() & {"failed", "error", "errors"}, text


@pytest.mark.parametrize("name", NAMES)
def test_a_proof_fails_without_the_effect_of_its_flag(name: str, with_their_flags: None) -> None:
    counts, text = outcomes(PROOFS[name], without=name)
    if counts.keys() & {"skipped"} and not counts.keys() & {"passed", "failed"}:
        pytest.skip(f"{PROOFS[name]} is skipped on this machine")
    assert counts.get("failed"), f"{PROOFS[name]} does not need --{name}:\n{text[-2000:]}"


def test_a_proof_that_does_not_need_its_flag_is_found_out() -> None:
    counts, _ = outcomes(PROOFS["revision"], without="page-size")
    assert counts == {"passed": 1}
