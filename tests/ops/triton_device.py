"""Where the Triton kernels run in tests: on a CUDA device, or in Triton's interpreter.

Without a device: TRITON_INTERPRET=1 python -m pytest tests/ops/test_cuda_kernels.py, with the
package triton installed.
"""

import os
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
import torch

IS_INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
ABSENCE = ""
"""Why they run nowhere."""
if find_spec("triton") is None:
    ABSENCE = "the package triton is not installed"
elif not IS_INTERPRETED and not torch.cuda.is_available():
    ABSENCE = "no CUDA device, and TRITON_INTERPRET is not set"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
TYPES = [torch.float32, torch.float16] + ([] if IS_INTERPRETED else [torch.bfloat16])
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PAGE = 16
SHAPES = [  # (context, count) of each row
    [(0, 1), (37, 1), (16, 1)],
    [(5, 1)],
    [(0, 70), (33, 1), (3, 20), (0, 1), (80, 17)],
    [(300, 1), (0, 1), (257, 1)],
    [(290, 30)],
]


@pytest.fixture
def exact_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter (3.6) forgets to carry where a number rounds up to a power of two, and reads
    no NaN: torch converts to and from 8-bit floats instead."""
    if not IS_INTERPRETED:
        return
    interpreter = import_module("triton.runtime.interpreter")
    language, own = import_module("triton.language"), interpreter._convert_float

    def convert(data: np.ndarray, kind: object, to: object, mode: object) -> np.ndarray:
        if (kind, to) == (language.float8e4nv, language.float16):
            eight = torch.from_numpy(np.ascontiguousarray(data)).view(torch.float8_e4m3fn)
            return eight.half().numpy().view(np.uint16).reshape(data.shape)
        if (kind, to) != (language.float32, language.float8e4nv):
            return own(data, kind, to, mode)
        floats = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
        made = floats.clamp(-448, 448).to(torch.float8_e4m3fn)
        return made.view(torch.uint8).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    most = TOLERANCE[dtype]
    torch.testing.assert_close(got.double().cpu(), want.double().cpu(), atol=most, rtol=most)
