"""What lets the real torch_npu be imported where there is no CANN: libraries with the names that it
links against, whose functions do nothing and say that they succeeded.

Enough for schemas and meta kernels, which compute nothing. Numbers must never be asked of it.
"""

import os
import re
import subprocess
from pathlib import Path

_OF_CANN = re.compile(r"(acl[A-Za-z]|rt[A-Z]|Msprof)\w*")
_LIBRARIES = (
    *("libascendcl.so", "libhccl.so", "libacl_op_compiler.so", "libge_runner.so"),
    *("libgraph.so", "libacl_tdt_channel.so"),
)
_ANSWERS = """
const char* aclrtGetSocName(void) { return "Ascend910_9382"; }
const char* aclGetRecentErrMsg(void) { return "there is no CANN here"; }
int aclrtGetDeviceCount(unsigned* count) { *count = 1; return 0; }
int aclrtGetDevice(int* device) { *device = 0; return 0; }
"""


def build(package: Path, out: Path) -> None:
    """Write the libraries for the torch_npu that lies in `package` into `out`."""
    wanted: set[str] = set()
    for library in (*package.glob("lib/*.so"), *package.glob("_C*.so")):
        if "atb" not in library.name:  # needs one more package, and is loaded only when it is there
            wanted |= _missing(library)
    answered = set(re.findall(r"(\w+)\(", _ANSWERS))
    source = _ANSWERS + "".join(
        f"long {n}(void) {{ return 0; }}\n" for n in sorted(wanted - answered)
    )
    out.mkdir(parents=True, exist_ok=True)
    for name in _LIBRARIES:
        subprocess.run(
            [*("gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(out / name))]
            + [f"-Wl,-soname,{name}"],
            input=source if name == _LIBRARIES[0] else "",
            text=True,
            check=True,
        )


def _missing(library: Path) -> set[str]:
    output = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    )
    names = (line.split()[-1].split("@")[0] for line in output.stdout.splitlines() if line.strip())
    return {name for name in names if _OF_CANN.fullmatch(name)}


def environment(packages: Path | None, stub: Path, root: Path) -> dict[str, str]:
    """Of a process that imports the torch_npu of `packages`; None = no package at all."""
    return {
        **os.environ,
        "PYTHONPATH": str(root) if packages is None else f"{packages}:{root}",
        "LD_LIBRARY_PATH": str(stub),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
