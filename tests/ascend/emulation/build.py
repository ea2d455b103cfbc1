"""Builds npu.cpp against the installed torch, once per version of either."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

SOURCE = Path(__file__).parent / "npu.cpp"
HEADER = SOURCE.with_name("races.h")
NAME = "banyan_emulated_npu"
_TIMEOUT_S = 900


def absence() -> str:
    """Why nothing can be built here; "" when something can."""
    if shutil.which("g++") is None:
        return "no g++ is here, and the emulated NPU is compiled"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if header.is_file() else f"the headers of Python are not here: {header}"


def load(folder: Path | None = None) -> ModuleType:
    """The compiled module; builds it when the cache does not hold it, in about a minute.

    Args:
        folder: the cache; default: ~/.cache/banyan/emulation.

    Raises:
        RuntimeError: the compiler fails; the text is what it says.
    """
    seed = (
        SOURCE.read_bytes()
        + HEADER.read_bytes()
        + f"{torch.__version__} {sysconfig.get_platform()}".encode()
    )
    home = folder or Path.home() / ".cache" / "banyan" / "emulation"
    home = home / hashlib.sha256(seed).hexdigest()[:16]
    library = home / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():
            _compile(library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(library: Path) -> None:
    from torch.utils import cpp_extension

    made = library.with_suffix(f".{os.getpid()}")
    folders = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    command = [
        *("g++", "-shared", "-fPIC", "-std=c++20", "-O1", "-g0", str(SOURCE), "-o", str(made)),
        *(f"-I{folder}" for folder in folders),
        *(f"-L{folder}" for folder in cpp_extension.library_paths()),
        *("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"),
        *(f"-DTORCH_EXTENSION_NAME={NAME}", "-DTORCH_API_INCLUDE_EXTENSION_H"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"the emulated NPU cannot be built:\n{done.stderr[-4000:]}")
    made.replace(library)
