"""The Triton kernels compiled for an H100, which needs no device: the interpreter takes what the
compiler refuses. Needs the package triton (`make test-cuda`)."""

import re
import subprocess
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from banyan.ops.cuda import triton_attention
from banyan.ops.cuda.expert_weights import NUMBER_TYPES, PackedProjection
from banyan.ops.cuda.triton_experts import assembly_of, tiles_for, tiles_of_one
from tests.ops.triton_device import IS_INTERPRETED

triton = pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("TRITON_INTERPRET is set", allow_module_level=True)
kernels, lora_kernels, attention_kernels, latent_kernels, sampling_kernels = (
    import_module(f"banyan.ops.cuda.{name}kernels")
    for name in ("", "lora_", "attention_", "latent_", "sampling_")
)
H100 = import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
MOST_SHARED = 232_448
"""Bytes of shared memory of a program on an H100."""
HALF, FLOAT, INT, LONG, EIGHT, BYTES = "*bf16", "*fp32", "*i32", "*i64", "*fp8e4nv", "*i8"
FLOATS = ("scale", "soft_cap", "unit", "inverse", "eps")


def compiled(
    kernel, pointers: dict[str, str], constants: dict[str, object], source=None, **options: int
):
    """What a launch would run; arguments that are neither named are int32."""
    types = dict.fromkeys(FLOATS, "fp32") | pointers | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    found = (source or triton.compiler.ASTSource)(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    made = triton.compile(found, target=H100, options=options)
    assert made.metadata.shared <= MOST_SHARED
    return made


def assert_asynchronous(made) -> None:
    """Its matrix products run next to other work: ptxas says so where it has to serialise them."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(made.asm["ptx"])
        binary = import_module("triton").knobs.nvidia.ptxas.path
        command = [binary, "-v", "--gpu-name=sm_90a", str(source), "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "wgmma.mma_async" in made.asm["ptx"] and "serialized" not in said
    assert sum(int(size) for size in re.findall(r"(\d+) bytes spill stores", said)) <= 512


def attention_types(pages: str) -> dict[str, str]:
    scales = FLOAT if pages == BYTES else pages
    tensors = {"q": HALF, "k_pages": pages, "v_pages": pages, "out": HALF, "sinks": FLOAT}
    tensors |= {"page_tables": INT, "context_lengths": INT, "row_starts": INT, "ends": INT}
    tensors |= dict.fromkeys(("bests", "totals", "results"), FLOAT)
    return tensors | {"k_scales": scales, "v_scales": scales}


@pytest.mark.parametrize("pages", [HALF, EIGHT, BYTES])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_attention_over_pages(pages, head_dim):
    common = {"HAS_SCALES": pages == BYTES, "HAS_CAP": False, "HAS_SINKS": True, "PAGE": 64}
    common |= {"HEAD_DIM": head_dim, "BLOCK_D": head_dim, "GROUP": 4}
    kinds, size = attention_types(pages), 128 if head_dim <= 128 else 256
    in_blocks, apart = triton_attention.MANY[size], triton_attention.MANY_APART[size]
    ways = [(in_blocks, True), (apart, False)]
    if pages != HALF and head_dim <= 128:
        ways = [(triton_attention.MANY_CONVERTED, pages == EIGHT)]
    elif pages == BYTES:
        ways = [(apart, False)]
    for tiles, is_tiled in ways:
        tile = f"tensordesc<{pages[1:]}[{tiles.keys}, {head_dim}]>" if is_tiled else pages
        many = {"IS_TILED": is_tiled, "HAS_ENDS": False, "PER_BLOCK": tiles.queries // 4}
        many |= {**common, "BLOCK": tiles.queries, "KEYS": tiles.keys}
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        types = {**kinds, "k_tiles": tile, "v_tiles": tile}
        made = compiled(attention_kernels.attend, types, many, **options)
        if is_tiled:
            if pages == HALF:
                assert_asynchronous(made)
            assert "cp.async.bulk.tensor" in made.asm["ptx"]
    small = triton_attention.ONE if pages == HALF else triton_attention.ONE_OF_8_BITS
    tiles = small if head_dim <= 128 else triton_attention.ONE_WIDE
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    for is_split in (False, True):
        one = {**common, "BLOCK": 16, "KEYS": tiles.keys, "PART": 256, "IS_SPLIT": is_split}
        types = {**kinds, "k_tiles": pages, "v_tiles": pages}
        compiled(attention_kernels.attend_rows, types, {**one, "IS_TILED": False}, **options)
    rest = {name: common[name] for name in ("HAS_SINKS", "HEAD_DIM", "BLOCK_D")}
    compiled(attention_kernels.merge, kinds, {**rest, "PART": 256, "AT_ONCE": 16}, num_warps=1)


@pytest.mark.parametrize(("head_dim", "page", "keys"), [(128, 64, 64), (64, 64, 64)])
def test_attention_with_warps_that_load(head_dim, page, keys):
    gluon = import_module("triton.experimental.gluon._runtime")
    layout = import_module("triton.experimental.gluon.language").NVMMASharedLayout(128, 16, 2)
    tile = f"tensordesc<bf16[{keys}, {head_dim}],{layout!r}>"
    tensors = {**attention_types(HALF), "k_tiles": tile, "v_tiles": tile}
    sizes = {"HAS_SINKS": True, "PAGE": page, "HEAD_DIM": head_dim, "GROUP": 4, "PER_BLOCK": 32}
    sizes |= {"KEYS": keys, "STAGES": triton_attention.MANY_ON_HOPPER.stages}
    attend = import_module("banyan.ops.cuda.hopper_kernels").attend_on_hopper
    made = compiled(attend, tensors, sizes, source=gluon.GluonASTSource, num_warps=4)
    assert_asynchronous(made)
    assert "setmaxnreg" in made.asm["ptx"]


@pytest.mark.parametrize(("pages", "most"), [(HALF, 0), (EIGHT, 448.0), (BYTES, 0)])
def test_writing_of_pages(pages, most):
    tensors = {"k": HALF, "v": HALF, "k_pages": pages, "v_pages": pages, "locations": LONG}
    tensors |= dict.fromkeys(("k_scales", "v_scales"), FLOAT if pages == BYTES else pages)
    sizes = {"PAGE": 64, "HEAD_DIM": 80, "BLOCK_D": 128, "MOST": most, "HAS_SCALE": pages == BYTES}
    compiled(kernels.write_pages, tensors, sizes, num_warps=1, enable_fp_fusion=False)


@pytest.mark.parametrize("is_divided", [False, True])
def test_attention_over_latents(is_divided):
    tensors = {"q": HALF, "q_turned": HALF, "latent_pages": HALF, "key_pages": HALF}
    tensors |= {"page_tables": INT, "row_starts": INT, "context_lengths": INT, "chosen": INT}
    tensors |= {"out": FLOAT if is_divided else HALF, "sums": FLOAT, "paths": INT}
    sizes = {
        "HAS_PATHS": is_divided,
        "HAS_CHOSEN": True,
        "IS_DIVIDED": is_divided,
        "PAGE": 64,
        "BLOCK_R": 512,
    }
    sizes |= {"BLOCK_T": 64, "GROUP": 16, "PER_BLOCK": 1, "BLOCK": 16, "KEYS": 64}
    sizes |= {"LEAST": 128, "PRECISION": "tf32"}
    compiled(latent_kernels.attend_latents, tensors, sizes, num_warps=4, num_stages=2)


def test_rows():
    ends = {"x": HALF, "residual": HALF, "weight": HALF, "out": HALF, "total": HALF}
    for has_residual in (False, True):
        compiled(kernels.norm, ends, {"HAS_RESIDUAL": has_residual, "BLOCK": 4096}, num_warps=8)
    turned = {"q": HALF, "k": HALF, "q_out": HALF, "k_out": HALF, "cos": FLOAT, "sin": FLOAT}
    turned |= {"q_weight": HALF, "k_weight": HALF}
    for rest, has_norms in ((0, True), (64, False), (64, True)):
        sizes = {"BLOCK": 64, "REST": rest, "HAS_NORMS": has_norms}
        compiled(kernels.rotate, turned, sizes, num_warps=1)
    for is_limited in (False, True):
        sizes = {"LIMITED": is_limited, "BLOCK": 1024}
        compiled(kernels.silu_gate, {"gate_up": HALF, "out": HALF, "limit": "fp32"}, sizes)


def test_drawing():
    tensors = {"logits": FLOAT, "bests": FLOAT, "words": LONG, "flags": "*u8", "slots": LONG}
    tensors |= {"positions": LONG, "tokens": LONG, "found": FLOAT}
    places = ("TEMPERATURE", "TOP_K", "TOP_P", "MIN_P", "SEED")
    sizes = {name: at for at, name in enumerate(places, 1)}
    sizes |= {"WORDS": 11, "GREEDY": 80, "TILE": 4096}
    made = compiled(sampling_kernels.draw, tensors, sizes, num_warps=16, enable_fp_fusion=False)
    assert "fma.rn.f32" not in made.asm["ptx"], "each rounding is one of the definition"


@pytest.mark.parametrize("type", [HALF, FLOAT])
@pytest.mark.parametrize("ranks", [16, 64])
def test_adapters(type, ranks):
    tensors = dict.fromkeys(("x", "down", "up", "out"), type) | {"inner": FLOAT, "others": "*i1"}
    sizes = {"CAPACITY": 8, "ROWS": 16, "RANKS": ranks}
    down = sizes | {"CUT": 512, "STEP": 128}
    compiled(lora_kernels.go_down, tensors, down, num_warps=4)
    for known in ({}, {"first_size": 1}):  # a constant of a launch
        up = sizes | {"COLUMNS": 128, "AT_ONCE": 8} | known
        compiled(lora_kernels.go_up, tensors, up, num_warps=4)


STATES = import_module("banyan.ops.cuda.state_kernels")
ROWS = {"pages": INT, "row_starts": INT, "context_lengths": INT, "checkpoints": INT}
KEPT = {"HAS_CHECKPOINTS": True}


@pytest.mark.parametrize(("key_dim", "by_key"), [(128, False), (128, True), (256, False)])
def test_a_scan_keeps_its_state_in_registers(key_dim, by_key):
    tensors = dict.fromkeys(("q", "k", "v", "strength", "out"), HALF)
    tensors |= dict.fromkeys(("kept", "skip", "states"), FLOAT) | ROWS
    for has_delta in (False, True):
        sizes = {"HAS_DELTA": has_delta, "HAS_SKIP": not has_delta, "BY_KEY": by_key}
        sizes |= {"HAS_CHECKPOINTS": has_delta, "KEYS": key_dim, "VALUES": 1024 // key_dim}
        made = compiled(STATES.scan_rows, tensors, sizes, num_warps=1)
        assert ".local" not in made.asm["ptx"]


def test_other_ops_on_states():
    tensors = dict.fromkeys(("q", "k", "v", "out"), HALF) | ROWS
    tensors |= dict.fromkeys(("step", "rate", "skip", "states"), FLOAT)
    compiled(STATES.scan_channels, tensors, KEPT | {"KEYS": 16, "CHANNELS": 64}, num_warps=1)
    tensors = {"x": HALF, "out": HALF, "weight": FLOAT, "bias": FLOAT, "last_inputs": FLOAT} | ROWS
    kept = KEPT | {"TAPS": 4, "KEPT": 4, "CHANNELS": 128}
    for is_whole in (False, True):
        sizes = {"HAS_BIAS": True, "HAS_SILU": True, "IS_WHOLE": is_whole, **kept}
        sizes |= {"TOKENS": 1 if is_whole else 32}
        compiled(STATES.convolve, tensors, sizes, num_warps=1 if is_whole else 4)
    compiled(STATES.shift_inputs, {"x": HALF, "last_inputs": FLOAT} | ROWS, kept, num_warps=1)
    gates = {"x": HALF, "gate": HALF, "out": HALF}
    for curve in range(4):
        compiled(STATES.gate_rows, gates, {"CURVE": curve, "BLOCK": 1024}, num_warps=4)
    decay = {"x": HALF, "low": "fp32", "high": "fp32"}
    decay |= dict.fromkeys(("bias", "rate", "step", "kept"), FLOAT)
    compiled(STATES.decay, decay, {"BLOCK": 32}, num_warps=1)


def test_an_indexer_multiplies_on_tensor_cores():
    tensors = dict.fromkeys(("q", "q_turned", "weights", "key_pages", "turned_pages"), HALF)
    tensors |= {"page_tables": INT, "row_starts": INT, "context_lengths": INT, "scores": FLOAT}
    tensors["paths"] = INT
    sizes = {"PAGE": 64, "BLOCK_D": 64, "BLOCK_T": 64, "HEADS": 64, "KEYS": 128}
    sizes |= {"PRECISION": "tf32", "HAS_PATHS": False}
    made = compiled(latent_kernels.score_positions, tensors, sizes, num_warps=4)
    assert "wgmma" in made.asm["ptx"]
    tensors = {"scores": FLOAT, "chosen": INT, "row_starts": INT, "context_lengths": INT}
    sizes = {"TILE": 2048, "HAS_PATHS": True}
    compiled(latent_kernels.choose_best, tensors | {"paths": INT}, sizes, num_warps=4)


@pytest.mark.parametrize("pages", [HALF, EIGHT, "*i8"])
def test_attention_along_branches(pages):
    tensors = {"q": HALF, "k_pages": pages, "v_pages": pages, "out": HALF, "sinks": FLOAT}
    tensors |= {"k_scales": FLOAT, "v_scales": FLOAT, "paths": INT}
    tensors |= {"page_tables": INT, "row_starts": INT}
    sizes = {"HAS_CAP": False, "HAS_SINKS": True, "HAS_SCALES": pages == "*i8", "PAGE": 64}
    sizes |= {"HEAD_DIM": 128, "BLOCK_D": 128, "GROUP": 4, "BLOCK": 16, "KEYS": 64}
    branches = import_module("banyan.ops.cuda.branch_kernels")
    compiled(branches.attend_paths, tensors, sizes, num_warps=4)


expert_kernels = import_module("banyan.ops.cuda.expert_kernels")
EXPERTS = {  # numbers, their type, of scales, chunk, activations
    "float": ("float", HALF, HALF, 64, HALF),
    "fp8": ("e4m3", EIGHT, FLOAT, 128, HALF),
    "fp8 rounded": ("e4m3", EIGHT, FLOAT, 128, HALF),
    "int8": ("int8", "*i8", "*fp16", 32, HALF),
    "int4": ("int4", "*u8", "*fp16", 64, HALF),
    "mxfp4": ("e2m1", "*u8", "*u8", 32, HALF),
    "nvfp4": ("e2m1", "*u8", EIGHT, 16, HALF),
}


def projection_of(form: str) -> PackedProjection:
    """What the sizes of products depend on."""
    number, numbers, _, chunk, _ = EXPERTS[form]
    types = (type for type in NUMBER_TYPES.values() if type.name == number)
    kind = None if number == "float" else replace(next(types), rounds=form == "fp8 rounded")
    dtype = torch.bfloat16 if numbers == HALF else torch.uint8
    return PackedProjection(kind, 0, 0, chunk, torch.empty(0, dtype=dtype))


def experts_of(form: str, dtype: torch.dtype) -> tuple[dict[str, str], dict[str, object]]:
    number, numbers, scales, chunk, x = EXPERTS[form]
    tensors = {"x": x, "x_units": FLOAT, "numbers": numbers, "scales": scales, "minima": scales}
    tensors |= {"units": FLOAT, "bias": FLOAT, "out": HALF, "ids": LONG}
    tensors |= {"limit": "fp32", "alpha": "fp32"}
    base = 8 if number == "int4" else 0
    assembly = "" if number in ("float", "e4m3") else assembly_of(number, base, dtype)
    sizes = {"NUMBER": number, "BASE": base, "SHARED": 128 if number == "e4m3" else 1}
    sizes |= {"IS_ONCE": number == "float", "HAS_SCALES": number != "float", "HAS_MINIMA": False}
    sizes |= {"HAS_UNITS": form == "nvfp4", "HAS_BIAS": form == "mxfp4", "WHOLE": True}
    sizes |= {"CHUNK": chunk, "PRECISION": "tf32", "ASSEMBLY": assembly}
    return tensors, sizes


@pytest.mark.parametrize("form", EXPERTS)
@pytest.mark.parametrize("rows", [16, 128])
def test_experts(form, rows):
    tensors, sizes = experts_of(form, torch.bfloat16)
    places = ("order", "block_experts", "block_firsts", "block_ends", "total")
    tensors |= dict.fromkeys(places, INT)
    rounds = ("here" if rows == 16 else "before") if form == "fp8 rounded" else ""
    if rounds == "before":
        tensors["x"] = EIGHT
    tiles = tiles_for(rows, projection_of(form))
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    gated = {"ROWS": rows, "COLUMNS": tiles.columns, "GATE": "silu", "ALONE": False}
    gated |= {"ROUNDS": rounds, "IS_TURNED": tiles.is_turned} | sizes
    made = compiled(expert_kernels.expert_product, tensors, gated, **options)
    assert ("wgmma" in made.asm["ptx"]) == (rows >= 64)


@pytest.mark.parametrize("form", EXPERTS)
def test_the_second_products_of_one_token(form):
    tensors, sizes = experts_of(form, torch.bfloat16)
    tiles = tiles_of_one(projection_of(form))
    sizes |= {"PER_TOKEN": 8, "CHOICES": 8, "ROWS": 16, "COLUMNS": tiles.columns}
    sizes |= {"ROUNDS": "here" if form == "fp8 rounded" else ""}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    compiled(expert_kernels.outer_of_one, tensors | {"weights": FLOAT}, sizes, **options)


@pytest.mark.parametrize("type", [HALF, FLOAT])
@pytest.mark.parametrize("ranks", [2, 8])
def test_sums_over_ranks(type, ranks):
    sums = import_module("banyan.ops.cuda.all_reduce_kernels")
    tensors = {"x": type, "buffers": LONG, "pads": LONG, "calls": LONG}
    sizes = {"RANKS": ranks, "BLOCK_R": max(2, ranks), "BLOCK": 1024}
    for kernel in (sums.reduce_at_once, sums.reduce_in_parts):
        made = compiled(kernel, tensors, sizes, num_warps=4)
        assert "atom.global.sys.release" in made.asm["ptx"], "the others see what was written"
        assert "atom.global.sys.acquire" in made.asm["ptx"]
    parts = {"parts": type, "out": type}
    compiled(sums.add_parts, parts, {"RANKS": ranks, "BLOCK": 1024}, num_warps=4)
