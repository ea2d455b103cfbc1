"""Products with low-bit weights compiled for an H100, which needs no device: matrix products are
asynchronous and nothing is spilled. Needs the package triton (`make test-cuda`)."""

import os
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path

import pytest
import torch

from banyan.ops.cuda import fp8, products
from tests.ops.triton_device import IS_INTERPRETED

triton = pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("TRITON_INTERPRET is set", allow_module_level=True)
H100 = import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
MOST_SHARED = 232_448
"""Bytes of shared memory of a program on an H100."""
HALF, FLOAT, EIGHT = "*bf16", "*fp32", "*fp8e4nv"
PRODUCTS = import_module("banyan.ops.cuda.product_kernels")
ALIGNED = ("inputs", "outputs", "filled", "x_row")
"""Sizes that are multiples of 16, as all addresses are."""


def compiled_product(
    kernel, pointers: dict[str, str], constants: dict[str, object], shape: products.Shape
) -> str:
    """The PTX of a product. It has asynchronous matrix products, which ptxas does not run one at a
    time, and keeps everything in registers."""
    types, names = pointers | dict.fromkeys(constants, "constexpr"), kernel.arg_names
    aligned = (name for name in names if types.get(name, "")[:1] == "*" or name in ALIGNED)
    constants = constants | {"ROWS": shape.rows, "OUTPUTS": shape.outputs}
    types |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    made = triton.compile(source, target=H100, options=options)
    assert made.metadata.shared <= MOST_SHARED
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        command = [str(tool), "-v", "-arch=sm_90a", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert " 0 bytes spill stores" in said and "serialized" not in said
    assert "wgmma.mma_async" in made.asm["ptx"]
    return made.asm["ptx"]


@pytest.mark.parametrize("rows", [33, 65, 129])
@pytest.mark.parametrize(("bits", "chunk"), [(4, 64), (4, 32), (8, 32), (8, 128)])
@pytest.mark.parametrize("has_minima", [False, True])
def test_products_with_integers_for_many_rows(bits, chunk, has_minima, rows):
    numbers = torch.empty(2, 256, chunk, dtype=torch.uint8)
    scales = torch.empty(1, 256)
    packed = products.PackedNumbers(bits, 8, 256, 4096, 128, numbers, scales, None)
    tensors = {"x": HALF, "numbers": "*u8" if bits == 4 else "*i8", "out": FLOAT, "bias": HALF}
    tensors |= {"sums": HALF, "counters": "*i32"}
    tensors |= {"scales": "*fp16", "minima": "*fp16", "units": FLOAT}
    fast = products.nibbles(torch.bfloat16, 8) if bits == 4 else products.octets(torch.bfloat16)
    sizes = {"BITS": bits, "BASE": 8, "HAS_MINIMA": has_minima, "HAS_UNITS": False}
    sizes |= {"HAS_BIAS": True, "CHUNK": chunk, "ASSEMBLY": fast, "ADDS": True}
    sizes["SCALING"] = products.scaling(has_minima)
    ptx = compiled_product(PRODUCTS.multiply_many, tensors, sizes, products.shape_of(rows, packed))
    assert "fma.rn.bf16x2" in ptx


@pytest.mark.parametrize("rows", [1, 20, 50, 100])
@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("how", ["exact", "rounding", "rounded"])
def test_products_with_8_bit_floats(how, is_grouped, rows):
    if how == "rounding" and rows > fp8.FEW_ROWS:
        return
    numbers, groups = torch.empty(256, 1).to(torch.float8_e4m3fn), 32 if is_grouped else 1
    packed = fp8.PackedFloats(256, 4096, 128, 1, numbers, torch.empty(groups, 256))
    tensors = {"x": EIGHT if how == "rounded" else HALF, "x_scales": FLOAT, "scales": FLOAT}
    tensors |= {"numbers": "*u8" if how == "exact" else EIGHT, "bias": HALF, "out": FLOAT}
    sizes = {"HOW": how, "IS_GROUPED": is_grouped, "SHARED": 128 if is_grouped else 1}
    sizes |= {"X_IS_GROUPED": is_grouped and how == "rounded", "HAS_BIAS": True, "IS_EVEN": True}
    sizes |= {"STEP": 128, "MOST": 448.0, "ADDS": True}
    tensors |= {"sums": HALF, "counters": "*i32"}
    sizes["ASSEMBLY"] = fp8.conversion(torch.bfloat16) if how == "exact" else ""
    shape = fp8.shape_of(rows, packed, torch.bfloat16 if how == "exact" else None)
    ptx = compiled_product(PRODUCTS.multiply_floats, tensors, sizes, shape)
    assert ("e4m3.e4m3" in ptx) == (how != "exact")


@pytest.mark.parametrize("group", [0, 128])
def test_rounding_of_rows_uses_the_devices_conversion(group):
    kernel, names = PRODUCTS.round_rows, PRODUCTS.round_rows.arg_names
    types = {"x": HALF, "numbers": EIGHT, "scales": FLOAT}
    sizes = {"GROUP": group, "BLOCK": 2048, "MOST": 448.0}
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in names if name not in sizes},
        constexprs={(names.index(name),): value for name, value in sizes.items()},
    )
    made = triton.compile(source, target=H100, options={"num_warps": 4})
    assert "cvt.rn.satfinite.e4m3x2.f32" in made.asm["ptx"]
