"""Random weights in every storage type."""

import functools

import numpy as np
import torch

from banyan.ops.stored import E4M3, STORAGE_TYPES, StoredWeight

ROUNDED = {"IQ1_S": 2**-10}
"""Types of which more than the scales is rounded in packing -> to what part of the largest."""

HALF_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,)} | {
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "MXFP4": (),
    **{
        name: (0,) for name in ("IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S")
    },
    **{"IQ1_M": (), "TQ1_0": (52,), "TQ2_0": (64,)},
}
"""Bytes of a block where its fp16 scales are; (0, 2) for the others."""


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def stored(name: str, outputs: int, inputs: int, low: float = -9.0, high: float = -5.0):
    """A weight of random blocks whose scales lie between 2^low and 2^high, either sign."""
    storage = STORAGE_TYPES[name]
    rng = np.random.default_rng(outputs * 1000 + inputs)
    if storage.is_float:
        values = torch.from_numpy(rng.standard_normal((outputs, inputs)).astype(np.float32))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        return StoredWeight.from_tensor(values.to(dtype))
    units = outputs * inputs // storage.values
    if name == E4M3:
        return eighths(outputs, inputs)
    raw = rng.integers(0, 256, (units, storage.size_bytes), dtype=np.uint8)
    for at in HALF_AT.get(name, (0, 2)):
        scales = 2.0 ** rng.uniform(low, high, units) * rng.choice([-1, 1], units)
        raw[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        raw[:, 0] = 127 + rng.integers(int(low), int(high), units)
    if name == "IQ1_M":  # the fp16 number lies in the high halves of four bytes
        scales = (2.0 ** rng.uniform(low, high, units)).astype(np.float16).view(np.uint16)
        for at in range(4):
            raw[:, 49 + 2 * at] = raw[:, 49 + 2 * at] & 15 | (scales >> 4 * at & 15) << 4
    return StoredWeight.from_bytes(name, (outputs, inputs), torch.from_numpy(raw.reshape(-1)))


def eighths(outputs: int, inputs: int) -> StoredWeight:
    """Numbers of all sizes in e4m3, the smallest ones and both zeros among them."""
    rng = np.random.default_rng(outputs * 1000 + inputs)
    codes = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    numbers = codes[rng.integers(0, len(codes), (outputs, inputs // 32, 32))]
    scales = (2.0 ** rng.uniform(-20, 3, (outputs, inputs // 32, 1))).astype(np.float32)
    raw = np.concatenate([numbers, scales.view(np.uint8)], -1)
    return StoredWeight.from_bytes(E4M3, (outputs, inputs), torch.from_numpy(raw.reshape(-1)))


def assert_close(got, want, limit):
    """`limit`: largest error in units of the results' root mean square."""
    size = want.pow(2).mean().sqrt()
    assert (got.double() - want).abs().max() <= limit * size
