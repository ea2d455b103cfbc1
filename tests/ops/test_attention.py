"""Paged attention against dense attention by hand, for random shapes and page tables."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.ops import reference
from banyan.ops.cpu.torch_attention import paged_attention

KERNELS = {"reference": reference.paged_attention, "cpu": paged_attention.run}


def dense(q, k, v, context, scale, window, soft_cap):
    """One row by the definition: loops over tokens and heads, in fp64."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for token in range(q.shape[0]):
        position = context + token
        first = max(0, position - window + 1) if window > 0 else -window
        for head in range(q.shape[1]):
            keys = k[first : position + 1, head // group].double()
            logits = keys @ q[token, head].double() * scale
            if soft_cap:
                logits = soft_cap * torch.tanh(logits / soft_cap)
            out[token, head] = logits.softmax(0) @ v[first : position + 1, head // group].double()
    return out


@st.composite
def steps(draw):
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 9))),
            min_size=1,
            max_size=6,
        )
    )
    window = draw(st.sampled_from([0, 0, 1, 5, 32, -1, -3]))
    return {
        "rows": [(max(context, -window), count) for context, count in rows],
        "kv_heads": draw(st.sampled_from([1, 2, 3])),
        "group": draw(st.sampled_from([1, 3, 8])),
        "head_dim": draw(st.sampled_from([4, 16])),
        "page_size": draw(st.sampled_from([1, 4, 16])),
        "window": window,
        "soft_cap": draw(st.sampled_from([0.0, 0.0, 3.0])),
        "seed": draw(st.integers(0, 1000)),
    }


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_paged_attention_is_dense_attention_whatever_lies_in_unused_pages(kernel, step):
    generator = torch.Generator().manual_seed(step["seed"])
    page_size, kv_heads, head_dim = step["page_size"], step["kv_heads"], step["head_dim"]
    lengths = [context + count for context, count in step["rows"]]
    max_pages = max(math.ceil(length / page_size) for length in lengths) + 1
    num_pages = 1 + sum(math.ceil(length / page_size) for length in lengths)
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    k_pages = torch.full((num_pages, page_size, kv_heads, head_dim), float("nan"))
    v_pages = torch.full_like(k_pages, float("inf"))
    tables = torch.zeros(len(lengths), max_pages, dtype=torch.int32)
    q = torch.randn(
        sum(count for _, count in step["rows"]),
        kv_heads * step["group"],
        head_dim,
        generator=generator,
    )
    expected, starts = [], [0]
    for row, (context, count) in enumerate(step["rows"]):
        length = context + count
        k, v = torch.randn(2, length, kv_heads, head_dim, generator=generator)
        for page in range(math.ceil(length / page_size)):
            tables[row, page] = order.pop()
        where = torch.arange(length)
        flat = tables[row].long()[where // page_size] * page_size + where % page_size
        window = step["window"]
        visible_from = max(0, context - window + 1) if window > 0 else -window
        reference.write_kv(
            k[visible_from:], v[visible_from:], k_pages, v_pages, flat[visible_from:]
        )
        mine = q[starts[-1] : starts[-1] + count]
        expected.append(dense(mine, k, v, context, 0.3, step["window"], step["soft_cap"]))
        starts.append(starts[-1] + count)

    out = KERNELS[kernel](
        q,
        k_pages,
        v_pages,
        tables,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([context for context, _ in step["rows"]], dtype=torch.int32),
        0.3,
        step["window"],
        step["soft_cap"],
    )

    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-5)
