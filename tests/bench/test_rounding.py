"""The schemes that `benchmarks/rounding.py` measures: the default is what the kernels do."""

import numpy as np
import pytest
import torch

from banyan.ops.cpu.build import BuildError, cached_library
from banyan.ops.cpu.library import Library
from banyan.ops.cpu.linear import pack_linear
from banyan.ops.stored import StoredWeight
from benchmarks.rounding import SCHEMES, Tally

DEFAULT = "one input of 512 kept apart, the default"


def rows(inputs: int) -> torch.Tensor:
    """Of which a few inputs are much larger than the others, as in a model."""
    x = torch.randn((5, inputs), generator=torch.Generator().manual_seed(inputs))
    x[:, 7] *= 40
    x[:, inputs - 3] *= 25
    return x


def identity(size: int) -> StoredWeight:
    """Q4_0: blocks of a half-precision scale, here 1, and 32 numbers of four bits from 8 on."""
    values = np.full((size, size), 8, np.uint8)
    np.fill_diagonal(values, 9)
    blocks = values.reshape(size, -1, 32)
    raw = np.empty((*blocks.shape[:2], 18), np.uint8)
    raw[..., :2] = np.ones(1, np.float16).view(np.uint8)
    raw[..., 2:] = blocks[..., :16] | blocks[..., 16:] << 4
    return StoredWeight.from_bytes("Q4_0", (size, size), torch.from_numpy(raw.reshape(-1)))


@pytest.mark.parametrize("inputs", [64, 576, 1536])
def test_the_default_is_what_the_kernels_round_to(inputs):
    try:
        library = Library(cached_library(), 1)
    except BuildError as error:
        pytest.skip(f"the compiled kernels cannot be built here: {error}")
    x = rows(inputs)

    by_kernel = pack_linear(library, identity(inputs))(x)
    library.close()

    torch.testing.assert_close(by_kernel, SCHEMES[DEFAULT](x), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(by_kernel, SCHEMES["8 bits per block of 32"](x), rtol=1e-6, atol=1e-6)


def test_each_scheme_is_closer_than_the_plain_one():
    x = rows(1152)
    errors = {name: float((scheme(x) - x).square().sum()) for name, scheme in SCHEMES.items()}
    plain = errors.pop("8 bits per block of 32")
    assert all(error < plain for error in errors.values())
    assert errors["one input of 72 kept apart"] < errors[DEFAULT] < plain
    assert errors["8 + 8 bits"] < 1e-3 * plain


def test_a_tally_counts_tokens_that_would_be_chosen_otherwise():
    exact = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]]).double().log()
    other = torch.tensor([[0.7, 0.2, 0.1], [0.35, 0.4, 0.25]]).double().log()
    tally = Tally()
    tally.add(exact, exact)
    tally.add(exact, other)
    kl = 0.05 * np.log(0.4 / 0.35) / 4
    assert tally.row("x") == ["x", f"{kl:.1e}", "25.00%", "50%"]
