"""The schema list of each release of torch_npu, `schemas/VERSION.txt`: one operator a line.

    python -m tests.ascend.emulation.real.lists FOLDER…   # torch_npu in each (pip install --target)

A release that this torch can load tells what it registers. Of another one the declarations in its
package are taken, which the first line says; both agree but for a few `.out` forms. The second line
names the operators of our cases that it has no meta kernels for.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.ascend.emulation.real import stub

HERE = Path(__file__).parent
LISTS = HERE / "schemas"
ROOT = HERE.parents[3]
_DECLARED = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
_LIMIT_S = 300
_ABSENT = "# no meta kernels:"


def versions() -> list[str]:
    return sorted(path.stem for path in LISTS.glob("*.txt"))


def schemas(version: str) -> dict[str, list[str]]:
    """Name without its overload -> its schemas, as torch writes them."""
    found: dict[str, list[str]] = {}
    for line in (LISTS / f"{version}.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            found.setdefault(line.partition("(")[0].partition(".")[0], []).append(line)
    return found


def without_meta(version: str) -> list[str]:
    """Operators of our cases that a release has no meta kernels for."""
    lines = (LISTS / f"{version}.txt").read_text(encoding="utf-8").splitlines()
    return [word for line in lines if line.startswith(_ABSENT) for word in line.split()[4:]]


def ask(packages: Path, is_apart: bool = False) -> dict[str, Any]:
    """What the torch_npu of a folder registers, and what its meta kernels give (ask.py).

    Args:
        is_apart: without its libraries (apart.py).
    """
    with tempfile.TemporaryDirectory() as folder:
        if not is_apart:
            stub.build(packages / "torch_npu", Path(folder))
        given = [str(packages.resolve())] if is_apart else []
        done = subprocess.run(
            [sys.executable, "-m", "tests.ascend.emulation.real.ask", *given],
            env=stub.environment(None if is_apart else packages, Path(folder), ROOT),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def version_of(packages: Path) -> str:
    (info,) = packages.glob("torch_npu-*.dist-info")
    return info.name.split("-")[1].removesuffix(".dist")


def can_load(packages: Path) -> bool:
    """Whether the torch that a release is for is there: this one, or one beside it."""
    is_ours = version_of(packages).split(".")[:2] == torch.__version__.split(".")[:2]
    return is_ours or (packages / "torch").is_dir()


def declared(packages: Path) -> list[str]:
    """The operators that a package's own declarations add."""
    read = yaml.safe_load((packages / _DECLARED).read_text(encoding="utf-8"))
    texts = {each["func"] for each in read["custom"]}
    found = {str(torch._C.parse_schema(f"npu::{text}")) for text in texts}
    return sorted(re.sub(r"\bself\b", "input", text) for text in found)  # as it registers them


def main() -> None:
    for word in sys.argv[1:]:
        packages = Path(word)
        version, loads = version_of(packages), can_load(packages)
        reported = ask(packages, is_apart=not loads)
        lines = reported["schemas"] if loads else declared(packages)
        how = "it registers them" if loads else "its package declares them"
        head = f"# torch_npu {version}, as {how}"
        absent = f"{_ABSENT} {' '.join(reported['absent'])}".strip()
        text = "\n".join([head, absent, *lines])
        (LISTS / f"{version}.txt").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
