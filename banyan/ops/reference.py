"""Every op in plain torch: the definition of correct results, and the fallback of every device.

Written to be read, not to be fast: attention walks the rows one by one, experts one after another.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from banyan.ops.api import PackedEmbedding, PackedHeadLinear, PackedLinear
from banyan.ops.experts_api import Clamp, ExpertPlaces, PackedExperts, Routing, StoredExperts
from banyan.ops.lora import (
    GAIN,
    LOOKED_UP,
    SOME_LOOKED_UP,
    SOME_OUTPUTS,
    AdapterTable,
    AdapterTokens,
    ExpertSides,
    ExpertTable,
    RowTable,
)
from banyan.ops.pages import FLOAT8, move_tokens, places_on, to_numbers, to_stored, walk_rows
from banyan.ops.sampling import SampleRows, log_softmax_at, sample_row, top_tokens
from banyan.ops.state_api import StateRows
from banyan.ops.stored import StoredWeight, stack


def write_latent(
    latent: Tensor, key: Tensor, latent_pages: Tensor, key_pages: Tensor, flat_locations: Tensor
) -> None:
    _put(latent_pages, flat_locations, to_stored(latent, latent_pages.dtype))
    _put(key_pages, flat_locations, to_stored(key, key_pages.dtype))


def latent_attention(
    q: Tensor,
    q_turned: Tensor,
    latent_pages: Tensor,
    key_pages: Tensor,
    page_tables: Tensor,
    row_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    chosen: Tensor | None = None,
    first: int = 0,
    paths: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(q)
    whole = torch.cat([q, q_turned], dim=-1)
    latents, keys = latent_pages.unsqueeze(2), key_pages.unsqueeze(2)  # one head
    for row, tokens, positions, path in walk_rows(row_starts, context_lengths, paths):
        v, k, lowest = gather_row(latents, keys, page_tables[row], positions, -first, path)
        seen = visible(positions.to(q.device), lowest, k.shape[0], 0)
        if chosen is not None:
            seen &= unpack_bits(chosen[tokens])[:, lowest : lowest + k.shape[0]]
        out[tokens] = dense_attention(whole[tokens], torch.cat([v, k], -1), v, seen, scale, 0.0)
    return out


def choose_positions(
    q: Tensor,
    q_turned: Tensor,
    weights: Tensor,
    key_pages: Tensor,
    turned_pages: Tensor,
    page_tables: Tensor,
    row_starts: Tensor,
    context_lengths: Tensor,
    top: int,
    first: int = 0,
    paths: Tensor | None = None,
) -> Tensor:
    words = -(-page_tables.shape[1] * key_pages.shape[1] // 32)
    chosen = torch.zeros(len(q), words * 32, dtype=torch.bool, device=q.device)
    whole = torch.cat([q, q_turned], dim=-1).float()
    keys, turned = key_pages.unsqueeze(2), turned_pages.unsqueeze(2)  # one head
    for row, tokens, positions, path in walk_rows(row_starts, context_lengths, paths):
        parts = gather_row(keys, turned, page_tables[row], positions, 0, path)[:2]
        k = torch.cat(parts, dim=-1).squeeze(1).float()  # [length, width of a head]
        each = torch.einsum("thd,ld->thl", whole[tokens], k).relu()
        scores = torch.einsum("thl,th->tl", each, weights[tokens].float())
        seen = visible(positions.to(q.device), 0, len(k), 0)
        seen[:, :first] = False
        scores = scores.masked_fill(~seen, float("-inf"))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        mine = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
        chosen[tokens, : len(k)] = mine & (scores > float("-inf"))
    worth = 1 << torch.arange(32, device=q.device)
    packed = (chosen.view(len(q), words, 32) * worth).sum(-1)
    return packed.to(torch.int32)


def unpack_bits(words: Tensor) -> Tensor:
    """[n, words] int32 -> [n, 32 · words] bool"""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> places) & 1).bool().flatten(1)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    flat_locations: Tensor,
    unit: float = 1.0,
) -> None:
    _put(k_pages, flat_locations, to_stored(k, k_pages.dtype, unit))
    _put(v_pages, flat_locations, to_stored(v, v_pages.dtype, unit))


def move_kv(k_pages: Tensor, v_pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    for pages in (k_pages, v_pages):
        move_tokens(pages, sources, targets)


def _put(pages: Tensor, flat_locations: Tensor, stored: Tensor) -> None:
    """torch moves no floats of 8 bits, but their bytes."""
    flat = pages.flatten(0, 1)
    if stored.dtype in FLOAT8:
        flat, stored = flat.view(torch.uint8), stored.view(torch.uint8)
    flat[flat_locations] = stored


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_tables: Tensor,
    row_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None = None,
    unit: float = 1.0,
    paths: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(q)
    for row, tokens, positions, path in walk_rows(row_starts, context_lengths, paths):
        k, v, first = gather_row(k_pages, v_pages, page_tables[row], positions, window, path)
        mine = None if ends is None else ends[tokens].to(q.device)
        seen = visible(positions.to(q.device), first, k.shape[0], window, mine)
        of_row = dense_attention(q[tokens], k, v, seen, scale * unit, soft_cap, sinks)
        out[tokens] = of_row if unit == 1.0 else of_row * unit
    return out


def gather_row(
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    window: int,
    path: Tensor | None = None,
) -> tuple[Tensor, Tensor, int]:
    """K and V that a row's positions may see, and the position of the first one.

    page_table: [max_pages] int32; positions: [count], consecutive, here or on the host; path: of
    the only position. returns: k, v [length, kv_heads, head_dim], first.
    """
    page_size = k_pages.shape[1]
    if path is not None:
        last = int(positions[0])  # sync: lengths of host-side slices
        first = max(0, last - window + 1) if window > 0 else -window
        places = places_on(path, first, last).to(page_table.device)
        where = page_table[places // page_size].long() * page_size + places % page_size
        k, v = (_taken(of.flatten(0, 1), where) for of in (k_pages, v_pages))
        return to_numbers(k), to_numbers(v), first
    start, stop = int(positions[0]), int(positions[-1]) + 1  # sync: lengths of host-side slices
    first = max(0, start - window + 1) if window > 0 else -window
    first_page = first // page_size
    pages = page_table[first_page : -(-stop // page_size)].long()
    inside = slice(first - first_page * page_size, stop - first_page * page_size)
    k, v = (_taken(of, pages).flatten(0, 1)[inside] for of in (k_pages, v_pages))
    return to_numbers(k), to_numbers(v), first


def _taken(pages: Tensor, chosen: Tensor) -> Tensor:
    if pages.dtype in FLOAT8:
        return pages.view(torch.uint8)[chosen].view(pages.dtype)
    return pages[chosen]


def visible(
    positions: Tensor, first: int, length: int, window: int, ends: Tensor | None = None
) -> Tensor:
    """Which of the keys at first … first + length − 1 each position sees. [count, length] bool

    ends: [count], as for `Ops.paged_attention`.
    """
    keys = torch.arange(first, first + length, device=positions.device)
    last = positions if ends is None else torch.maximum(positions, ends - 1)
    seen = keys <= last.unsqueeze(1)
    return seen & (keys > positions.unsqueeze(1) - window) if window > 0 else seen


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one row over gathered keys, in fp32.

    q: [count, heads, head_dim]; k: [length, kv_heads, head_dim];
    v: [length, kv_heads, value_dim]; seen: [count, length] bool; sinks: [heads] fp32.
    returns: [count, heads, value_dim], dtype of q.
    """
    count, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.float().view(count, kv_heads, heads // kv_heads, head_dim)
    logits = torch.einsum("ckgd,lkd->ckgl", grouped, k.float()) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~seen[:, None, None, :], float("-inf"))
    if sinks is None:
        weights = logits.softmax(-1)
    else:
        sink = sinks.to(logits).view(1, kv_heads, -1, 1).expand(count, -1, -1, 1)
        weights = torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
    out = torch.einsum("ckgl,lkd->ckgd", weights, v.float())
    return out.reshape(count, heads, v.shape[-1]).to(q.dtype)


def apply_gate(x: Tensor, gate: Tensor, curve: str) -> Tensor:
    curves = {"silu": functional.silu, "sigmoid": torch.sigmoid, "relu": torch.relu}
    return x * (curves[curve](gate) if curve else gate)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    has_silu: bool,
    last_inputs: Tensor,
    rows: StateRows,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    conv_kernel = weight.shape[0]
    for page, tokens, is_fresh, rollback_checkpoint in _walk(rows):
        before = torch.zeros_like(last_inputs[page]) if is_fresh else last_inputs[page]
        seen = torch.cat([before, x[tokens].float()])  # [conv_kernel − 1 + count, channels]
        count = tokens.stop - tokens.start
        total = torch.zeros(count, x.shape[1], device=x.device)
        if bias is not None:
            total = total + bias
        for i in range(conv_kernel):
            total = total + weight[i] * seen[i : i + count]
        out[tokens] = (functional.silu(total) if has_silu else total).to(x.dtype)
        last_inputs[page] = seen[count:]
        for t, kept in rollback_checkpoint.items():
            last_inputs[kept] = seen[t + 1 - tokens.start :][: conv_kernel - 1]
    return out


def decay_gates(
    x: Tensor, bias: Tensor, rate: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    step = functional.softplus(x.float() + bias).clamp(low, high)
    return step, torch.exp(-rate * step)


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor,
    strength: Tensor,
    skip: Tensor | None,
    has_delta: bool,
    states: Tensor,
    rows: StateRows,
) -> Tensor:
    shared = v.shape[1] // q.shape[1]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    wide_q, wide_k = (part.float().repeat_interleave(shared, 1).unsqueeze(-1) for part in (q, k))
    for page, tokens, is_fresh, rollback_checkpoint in _walk(rows):
        state = torch.zeros_like(states[page]) if is_fresh else states[page]
        state = state.float().clone()
        for t in range(tokens.start, tokens.stop):
            value, force = v[t].float(), strength[t].unsqueeze(-1)
            state = kept[t].view(len(value), -1, 1) * state
            if has_delta:
                added = force.sigmoid() * (value - (wide_k[t] * state).sum(1))
            else:
                added = force * value
            state = state + wide_k[t] * added.unsqueeze(1)
            read = (wide_q[t] * state).sum(1)
            out[t] = (read if skip is None else read + skip.unsqueeze(-1) * value).to(v.dtype)
            if t in rollback_checkpoint:
                states[rollback_checkpoint[t]] = state
        states[page] = state
    return out


def selective_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    rate: Tensor,
    skip: Tensor,
    states: Tensor,
    rows: StateRows,
) -> Tensor:
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for page, tokens, is_fresh, rollback_checkpoint in _walk(rows):
        state = torch.zeros_like(states[page]) if is_fresh else states[page]
        state = state.float().clone()
        for t in range(tokens.start, tokens.stop):
            value = v[t].float()
            moved = k[t].float().unsqueeze(1) * (step[t] * value)
            state = torch.exp(-rate * step[t]) * state + moved
            out[t] = ((q[t].float().unsqueeze(1) * state).sum(0) + skip * value).to(v.dtype)
            if t in rollback_checkpoint:
                states[rollback_checkpoint[t]] = state
        states[page] = state
    return out


def _walk(rows: StateRows) -> Iterator[tuple[int, slice, bool, dict[int, int]]]:
    """Page, tokens, whether it begins at position 0, and tokens -> further pages that have the
    state after them, of each row that has tokens."""
    pages = rows.pages.tolist()  # sync: the reference walks the rows one by one
    starts = rows.row_starts.tolist()  # sync: as above
    contexts = rows.context_lengths.tolist()  # sync: as above
    rollback_checkpoints = (
        [] if rows.rollback_checkpoints is None else rows.rollback_checkpoints.tolist()
    )  # sync: as above
    for row, context in enumerate(contexts):
        first, end = starts[row : row + 2]
        if end > first:
            page, count = rollback_checkpoints[row] if rollback_checkpoints else (0, 0)
            rollback_checkpoint = {end - 1 - count + at: page + at for at in range(count)}
            yield pages[row], slice(first, end), context == 0, rollback_checkpoint


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), x.shape[-1:], weight.float(), wide, eps).to(x.dtype)


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def rotary_angles(
    positions: Tensor,
    frequencies: Tensor,
    magnitude: float,
    shifts: Tensor | None = None,
    axes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    along = positions.unsqueeze(1)
    if shifts is not None and axes is not None:
        along = along + shifts[:, axes.long()]
    angles = along.float() * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [tokens, 1, head_dim/2]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def norm_rotary(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    return rotary(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.shape[-1]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    turned = [first * cos - second * sin, second * cos + first * sin]  # fp32
    return torch.cat([part.to(x.dtype) for part in turned] + [rest], dim=-1)


def silu_and_mul(gate_up: Tensor, limit: float = math.inf) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if limit == math.inf:
        return functional.silu(gate) * up
    return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def select_rows(x: Tensor, chosen: Tensor) -> Tensor:
    return x[chosen]


def take_rows(x: Tensor, where: Tensor, rows: Tensor, adds: bool = False) -> Tensor:
    if not len(rows):
        return x
    taken = rows[where.clamp(min=0).long(), : x.shape[1]].to(x.dtype)
    return torch.where(where.unsqueeze(1) >= 0, x + taken if adds else taken, x)


def spread_columns(x: Tensor, columns: Tensor, width: int) -> Tensor:
    return x.new_full((len(x), width), float("-inf")).index_copy_(1, columns, x)


def concat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=-1)


def sigmoid_scale(x: Tensor, gate: Tensor) -> Tensor:
    return (x.unflatten(-1, (gate.shape[-1], -1)) * gate.sigmoid().unsqueeze(-1)).flatten(1)


def adapt(out: Tensor, x: Tensor, table: AdapterTable, tokens: AdapterTokens) -> None:
    if table.stack is not None:
        assert tokens.others is not None
        table.stack.add(out, x, tokens.others)
        return
    for number, where in tokens.groups():
        for at in where.tolist():  # each token by itself: sums differ with the number of rows
            for part in table.parts[number]:
                inner = part.down.float() @ x[at].float() * part.scale
                end = part.first + len(part.up)
                out[at, part.first : end] += (part.up.float() @ inner).to(out.dtype)


def adapt_rows(out: Tensor, x: Tensor, table: RowTable, tokens: AdapterTokens) -> None:
    for number, where in tokens.groups():
        part = table.parts[number]
        for at in where.tolist() if part is not None else ():
            assert part is not None
            if part.kind == GAIN:
                assert part.shifts is not None
                out[at] = part.rows * out[at] + part.shifts
                continue
            if part.kind in (SOME_LOOKED_UP, SOME_OUTPUTS):
                assert part.ids is not None
                for k, token in enumerate(part.ids.tolist()):
                    if part.kind == SOME_OUTPUTS:
                        out[at, token] = part.rows[k] @ x[at].float()
                    elif int(x[at]) == token:
                        out[at] = part.rows[k]
                continue
            if part.kind == LOOKED_UP:
                row = int(x[at]) - part.first
                if not 0 <= row < len(part.rows):
                    continue
                made = part.rows[row]
            else:
                made = part.rows @ x[at].float()
            made = made if part.up is None else made @ part.up
            out[at] = made if part.replaces else out[at] + made


def scale_logits(logits: Tensor, scale: float, soft_cap: float) -> Tensor:
    scaled = logits.float() * scale
    return soft_cap * torch.tanh(scaled / soft_cap) if soft_cap else scaled


class DenseEmbedding:
    """Rows of an embedding, unpacked into plain floats. [ids, dim]"""

    def __init__(self, table: Tensor, first: int, num_ids: int) -> None:
        self.table = table
        self.first = first
        self.is_whole = table.shape[0] == num_ids

    def __call__(self, tokens: Tensor) -> Tensor:
        if self.is_whole:
            return self.table[tokens]
        local = tokens - self.first
        outside = (local < 0) | (local >= self.table.shape[0])
        return self.table[local.masked_fill(outside, 0)].masked_fill(outside.unsqueeze(1), 0)


def pack_embedding(
    weight: StoredWeight,
    dtype: torch.dtype,
    device: torch.device,
    first: int,
    last: int,
    scale: float = 1.0,
) -> PackedEmbedding:
    num_ids = weight.shape[0]
    mine = weight if last - first == num_ids else weight.cut(0, first, last)
    table = mine.dense.to(device, dtype)
    return DenseEmbedding(table if scale == 1.0 else table * scale, first, num_ids)


class DenseLinear:
    """A weight unpacked once into plain floats of the activation dtype. [out, in]"""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, self.weight, bias)


def pack_linear(
    weight: StoredWeight, dtype: torch.dtype, device: torch.device, is_head: bool = False
) -> PackedLinear:
    return DenseLinear(weight.dense.to(device, dtype))


class DenseHeadLinear:
    """A matrix for each head in plain floats of the activation dtype. [heads, out, in]"""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.einsum("thi,hoi->tho", x.float(), self.weight.float()).to(x.dtype)


def pack_head_linear(
    weight: StoredWeight, dtype: torch.dtype, device: torch.device, may_round: bool
) -> PackedHeadLinear:
    return DenseHeadLinear(weight.dense.to(device, dtype))


def clamped_swiglu(gate: Tensor, up: Tensor, clamp: Clamp) -> Tensor:
    if not clamp.alpha:
        return functional.silu(gate).clamp(max=clamp.limit) * up.clamp(-clamp.limit, clamp.limit)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * torch.sigmoid(gate * clamp.alpha) * (up + 1)


def route(
    x: Tensor,
    weight: Tensor,
    correction: Tensor | None,
    rule: Routing,
    bias: Tensor | None = None,
    adapters: tuple[AdapterTable, AdapterTokens] | None = None,
) -> tuple[Tensor, Tensor]:
    logits = functional.linear(x.float(), weight, bias)
    if adapters is not None:
        adapt(logits, x, *adapters)
    if rule.scoring == "sparsemixer":
        return _sparsemixer(logits, rule)
    scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if rule.groups > 1:
        grouped = choice.unflatten(-1, (rule.groups, -1))  # [tokens, groups, experts of a group]
        worth = grouped.topk(rule.group_best, dim=-1).values.sum(-1)
        best = worth.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
        is_out = torch.ones_like(worth, dtype=torch.bool).scatter(1, best, False)
        choice = grouped.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.per_token]
    weights = scores.gather(1, ids)
    if rule.is_normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * rule.scale


def _sparsemixer(logits: Tensor, rule: Routing) -> tuple[Tensor, Tensor]:
    left, ids, weights = logits, list[Tensor](), list[Tensor]()
    for _ in range(rule.per_token):
        most, best = left.max(-1, keepdim=True)
        size = torch.maximum(logits.abs(), most)
        is_far = (most - left) / size > 2 * rule.jitter
        ids.append(best)
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(1, best))
        left = left.scatter(1, best, float("-inf"))
    return torch.cat(ids, dim=1), torch.cat(weights, dim=1)


def relu_squared(x: Tensor) -> Tensor:
    return functional.relu(x).square()


def adapt_expert(
    out: Tensor, x: Tensor, table: ExpertTable, tokens: AdapterTokens, owners: Tensor, expert: int
) -> None:
    """`adapt` for the rows of one expert, whose tokens are `owners`."""
    numbers = {token: number for number, some in tokens.groups() for token in some.tolist()}
    for at, token in enumerate(owners.tolist()):  # each by itself, as `adapt` does
        for part in table.parts[numbers.get(token, 0)].get(expert, ()):
            inner = part.down.float() @ x[at].float() * part.scale
            first = part.part * len(part.up) if out.shape[1] > len(part.up) else 0
            out[at, first : first + len(part.up)] += (part.up.float() @ inner).to(out.dtype)


class DenseExperts:
    """Experts unpacked into plain floats, one after another over their own tokens."""

    def __init__(self, experts: StoredExperts, dtype: torch.dtype, device: torch.device) -> None:
        gates = {"silu": silu_and_mul, "gelu": gelu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}
        self.first = experts.first
        self.gate = gates.get(experts.activation, relu_squared)
        self.clamp = experts.clamp
        pairs = zip(experts.gate, experts.up, strict=True) if experts.gate else zip(experts.up)
        self.gate_up = [stack(pair).dense.to(device, dtype) for pair in pairs]  # [2·inner, dim]
        self.down = [weight.dense.to(device, dtype) for weight in experts.down]
        self.biases: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(self.down)
        if experts.biases is not None:
            gate, up, down = (part.to(device, dtype) for part in experts.biases)
            self.biases = list(zip(torch.cat([gate, up], dim=1), down, strict=True))

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, sides: ExpertSides | None = None
    ) -> Tensor:
        out = torch.zeros_like(x)
        for tokens, places, outer in self._outputs(x, ids, sides):
            scaled = outer * weights[tokens, places].unsqueeze(1)
            out.index_add_(0, tokens, scaled.to(out.dtype))
        return out

    def apart(self, x: Tensor, ids: Tensor) -> Tensor:
        out = x.new_zeros(*ids.shape, x.shape[1])
        for tokens, places, outer in self._outputs(x, ids):
            out[tokens, places] = outer
        return out.flatten(1)

    def parts(self, at: int) -> list[Tensor]:
        biases = (bias for bias in self.biases[at] if bias is not None)
        return [self.gate_up[at], self.down[at], *biases]

    def put(self, at: int, parts: list[Tensor]) -> None:
        self.gate_up[at], self.down[at], *biases = (part.clone() for part in parts)
        if biases:
            self.biases[at] = (biases[0], biases[1])

    def _outputs(
        self, x: Tensor, ids: Tensor, sides: ExpertSides | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """By expert: its tokens, which of their choices it is, and its results."""
        for at, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            in_bias, out_bias = self.biases[at]
            tokens, places = torch.where(ids == self.first + at)
            if len(tokens):
                given, some = x[tokens], (tokens, at)
                made = functional.linear(given, gate_up, in_bias)
                if sides is not None:
                    adapt_expert(made, given, sides.gate_up, sides.tokens, *some)
                inner = self._gated(made)
                outer = functional.linear(inner, down, out_bias)
                if sides is not None:
                    adapt_expert(outer, inner, sides.down, sides.tokens, *some)
                yield tokens, places, outer

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self.clamp is None:
            return self.gate(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return clamped_swiglu(gate, up, self.clamp)


def place_experts(ids: Tensor, places: ExpertPlaces, dispatch: str) -> Tensor:
    tokens, per_token = ids.shape
    if dispatch == "even":
        pairs = torch.arange(ids.numel(), device=ids.device)
        return (pairs % len(places.copies)).view_as(ids)
    turns = torch.arange(tokens, device=ids.device).unsqueeze(1).expand(tokens, per_token)
    if dispatch == "dynamic":
        seen = functional.one_hot(ids.flatten(), len(places.copies)).cumsum(0) - 1
        turns = seen.gather(1, ids.flatten().unsqueeze(1)).view_as(ids)
    return places.slots[ids, turns % places.copies[ids]].long()


def combine_experts(x: Tensor, ids: Tensor, weights: Tensor, home: int) -> Tensor:
    pairs = x.unflatten(1, (ids.shape[1], -1))
    sums: dict[int, Tensor] = {}
    out = torch.zeros_like(pairs[:, 0])
    for expert in sorted(set(ids.flatten().tolist())):  # sync: the reference walks the experts
        tokens, places = torch.where(ids == expert)
        scaled = pairs[tokens, places] * weights[tokens, places].unsqueeze(1)
        mine = sums.setdefault(expert // home, torch.zeros_like(out))
        mine.index_add_(0, tokens, scaled.to(out.dtype))
    for at in sorted(sums):
        out = out + sums[at]
    return out


def pack_experts(experts: StoredExperts, dtype: torch.dtype, device: torch.device) -> PackedExperts:
    return DenseExperts(experts, dtype, device)


def sample(logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
    if rows.are_plain:
        best, tokens = logits.max(-1)
    else:
        host = logits.cpu().numpy()  # sync: rows are chosen one by one on the host
        here = rows.on_host()
        chosen = [sample_row(host[row], here, row) for row in range(len(host))]
        tokens = torch.tensor([token for token, _ in chosen]).to(logits.device)
        best = torch.tensor([value for _, value in chosen]).to(logits.device)
    rows.history[rows.slots, rows.positions] = tokens.to(torch.int32)
    return tokens, best


def logprobs(
    logits: Tensor, rows: Tensor, temperatures: Tensor, tokens: Tensor, top: int, picked: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    host = logits.cpu().numpy()  # sync: as in `sample`
    known, chosen = tokens.cpu().numpy(), picked.cpu().numpy()  # sync: as above
    ids = np.zeros((len(rows), top), np.int32)
    values = np.zeros((len(rows), 1 + top + picked.shape[1]), np.float32)
    for i, row in enumerate(rows.tolist()):  # sync: as above
        if np.isfinite(host[row].max()):
            ids[i] = top_tokens(host[row], top)
        wanted = np.concatenate([known[i : i + 1], ids[i], chosen[i]])
        values[i] = log_softmax_at(host[row], float(temperatures[i]), wanted)
    on_device = torch.from_numpy(values).to(logits.device)
    of_token, of_top, of_picked = on_device.split([1, top, picked.shape[1]], dim=1)
    return of_token[:, 0], torch.from_numpy(ids).to(logits.device), of_top, of_picked
