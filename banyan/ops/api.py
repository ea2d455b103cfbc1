"""The operations that layers and the runner call: signatures, shapes and dtypes, nothing else.

`ops/reference.py` defines the correct results; `ops/bind.py` chooses the kernels and returns one
bound `Ops` object. `experts_api.py`, `state_api.py` and `lora.py` have the operations of their
subjects. Letters: tokens, rows, heads, kv_heads, head_dim, pages; T is the activation dtype. Every
result of a token depends on its own sequence only, whatever else is in the batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from banyan.ops.experts_api import ExpertOps
from banyan.ops.lora import AdapterOps, AdapterRowOps
from banyan.ops.sampling import SampleRows
from banyan.ops.state_api import StateOps
from banyan.ops.stored import StoredWeight


class PackedLinear(Protocol):
    """A linear layer in the form of its kernel, chosen once at load."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x·Wᵀ + bias.

        x: [tokens, in] T; bias: [out] T or None.
        returns: [tokens, out] T, accumulated in fp32 or better.
        """
        ...


class PackedEmbedding(Protocol):
    """This rank's rows of an embedding, in the form of its kernel."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """The row of each token; ids of other ranks give zeros.

        tokens: [tokens] int64.
        returns: [tokens, dim] T.
        """
        ...


class PackedHeadLinear(Protocol):
    """A matrix per head, in the form of their kernel."""

    def __call__(self, x: Tensor) -> Tensor:
        """x[t, h] · weight[h]ᵀ for each head.

        x: [tokens, heads, in] T, tokens and heads may lie apart.
        returns: [tokens, heads, out] T, summed in fp32 or better.
        """
        ...


@dataclass(frozen=True)
class IndexShape:
    """
    Attributes:
        heads, dim: of the indexer.
        top: positions that it chooses.
        rank, rope_dim: of the latent attention that reads them.
    """

    heads: int
    dim: int
    top: int
    rank: int
    rope_dim: int


class IndexOps(Protocol):
    """See `ops.api.Ops`."""

    def joins_index(self, shape: IndexShape) -> bool:
        """Whether pages keep both parts of this indexer's keys side by side; `write_latent` and
        `choose_positions` then get the same pages for both."""
        ...


class LogitOps(Protocol):
    """Ops on logits before sampling."""

    def scale_logits(self, logits: Tensor, scale: float, soft_cap: float) -> Tensor:
        """logits · scale, then cap·tanh(logits/cap) unless the cap is 0, in fp32.

        logits: [n, ids] T.
        returns: [n, ids] fp32.
        """
        ...

    def spread_columns(self, x: Tensor, columns: Tensor, width: int) -> Tensor:
        """Logits of some ids as logits of all ids; the others can never be drawn.

        x: [n, ids] fp32; columns: [ids] int64, where each goes, below `width`.
        returns: [n, width] fp32, −∞ elsewhere.
        """
        ...


class RotaryOps(Protocol):
    """Rotary position embedding."""

    def rotary_angles(
        self,
        positions: Tensor,
        frequencies: Tensor,
        magnitude: float,
        shifts: Tensor | None = None,
        axes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of position · frequency in fp32, times the magnitude.

        positions: [tokens] int64; frequencies: [pairs] fp32; shifts: [tokens, axes] int32, what
        each axis adds to the position; axes: [pairs] int32, the axis of each pair.
        returns: cos, sin [tokens, pairs] fp32.
        """
        ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate the pairs (i, i + pairs) of every head by the angle of its token.

        Dimensions from 2·pairs on, where there are any, stay as they are.

        q: [tokens, heads, head_dim] T; k: [tokens, kv_heads, head_dim] T, tokens may lie apart;
        cos, sin: [tokens, pairs] fp32.
        returns: q, k rotated, same shapes and dtypes.
        """
        ...

    def norm_rotary(
        self,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`rms_norm` of every head of q and k, then `rotary`, rounded as these two.

        q_weight, k_weight: [head_dim] T; the rest as for `rotary`.
        """
        ...


class FeatureOps(Protocol):
    """Ops of prompts that are given by content."""

    def take_rows(self, x: Tensor, where: Tensor, rows: Tensor, adds: bool = False) -> Tensor:
        """x, with some of its rows replaced by given ones, or with those added to them.

        x: [tokens, dim] T; where: [tokens] int32, row of `rows` for each token, negative = none;
        rows: [any, dim] T, may lie apart.
        returns: [tokens, dim] T.
        """
        ...


SQUEEZE, QUERY, LATENT, KEYS = PARTS = ("squeeze", "query", "latent", "keys")
"""Its weights: x to squeezed queries, squeezed queries to heads, x to latent and key, heads'
keys."""


@dataclass(frozen=True)
class PrologueShape:
    """
    Attributes:
        dim: of the residual stream.
        query_rank: width that queries are squeezed through, 0 = none.
        heads: of this rank.
        rank, plain_dim, rope_dim: as of `config.model_config.LatentFacts`.
        query_eps, latent_eps: of the norms of squeezed queries and of latents.
        reads_squeezed: another op reads the squeezed queries too.
        obstacle: a feature of this layer that no fused operator has; "" = none.
    """

    dim: int
    query_rank: int
    heads: int
    rank: int
    plain_dim: int
    rope_dim: int
    query_eps: float
    latent_eps: float
    reads_squeezed: bool = False
    obstacle: str = ""


class LatentPrologue(Protocol):
    """One layer's projections, norms and rotation, and the writing of its pages."""

    def take(self, part: str, weight: StoredWeight) -> None:
        """Called at load, once per part, and again when weights are replaced.

        weight: of SQUEEZE [query_rank, dim]; of QUERY [heads · (plain_dim + rope_dim), query_rank]
        and of LATENT [rank + rope_dim, dim], whose rows that rotate lie as halves; of KEYS [heads,
        plain_dim, rank].
        """
        ...

    def is_ready(self) -> bool:
        """Whether it has all parts and can compute with them; the log says why not."""
        ...

    def __call__(
        self,
        x: Tensor,
        gammas: tuple[Tensor, Tensor],
        angles: tuple[Tensor, Tensor] | None,
        pages: tuple[Tensor, Tensor],
        flat_locations: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write latents and turned keys of the step into `pages`, and return its queries.

        x: [tokens, dim]; gammas: [query_rank], [rank]; angles: [tokens, rope_dim / 2] fp32 each;
        pages: as for `write_latent`; flat_locations: as for write_kv.
        returns: [tokens, heads, rank], [tokens, heads, rope_dim], and what was squeezed and normed,
        [tokens, query_rank], or anything where nobody reads it.
        """
        ...


class PrologueOps(Protocol):
    """See `ops.api.Ops`."""

    def open_prologue(self, shape: PrologueShape) -> LatentPrologue | None:
        """A fused operator for all ops before latent attention; None = there is none, and the log
        says why if the user asked for it."""
        ...


@dataclass(frozen=True)
class OpTime:
    """One stage of a recorded run: wall time, bytes it must read and write, and operations
    (multiplications and additions)."""

    name: str
    seconds: float
    bytes: float
    operations: float


@dataclass(frozen=True)
class Peaks:
    """Measured limits of a device.

    Attributes:
        read_bytes_s: memory read per second, by all cores.
        fp32_ops_s, int8_ops_s, bf16_ops_s: operations per second; 0 = not supported.
        passing_s: delay until a core sees what another one wrote; 0 with one core, or if other
            programs disturbed the measurement.
    """

    read_bytes_s: float
    fp32_ops_s: float
    int8_ops_s: float
    bf16_ops_s: float
    passing_s: float


@dataclass(frozen=True)
class MultiStepInputs:
    """Inputs of a multi-step run that change from step to step, and its end. All on the host.

    Attributes:
        sampled, best: [outputs] int64, fp32; outputs of the recorded work.
        tokens, positions, to_positions, lengths: [outputs] int64, int64, int64, int32; its inputs.
        places: for each cache group [tokens] int64, the location of each token.
        at: [groups, steps, rows] int64, the next values of `places`.
        first_stop: [rows + 1] int32, where the stop ids of each row begin in `stops`.
        stops: int32.
        interrupt: [1] int64; the run ends after the step that reads `number` or more there.
        steps_done: [1] int32, the steps that have run, set whenever another step follows.
        report_every: write to the eventfd `wake_fd` after so many steps; 0 = never.
        pace_ns: least time between two such writes, and before the first one.
    """

    sampled: np.ndarray
    best: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    to_positions: np.ndarray
    lengths: np.ndarray
    places: list[np.ndarray]
    at: np.ndarray
    first_stop: np.ndarray
    stops: np.ndarray
    interrupt: np.ndarray
    number: int
    steps_done: np.ndarray
    report_every: int
    wake_fd: int
    pace_ns: int


class Recording(Protocol):
    """A recorded program: it runs without Python, for any sizes up to the recorded ones."""

    @property
    def result(self) -> Tensor:
        """The result of the recorded work; a run fills its first rows."""
        ...

    def run(
        self, tokens: int, rows: int, outputs: int, all_tokens: int = 0, all_outputs: int = 0
    ) -> None:
        """Run once. all_…: sizes of all replicas together (DP attention)."""
        ...

    def multi_step(self, rows: int, inputs: MultiStepInputs) -> int:
        """Decode one token of each of `rows` requests per step, each step from the tokens that the
        last one sampled; returns the number of steps."""
        ...

    def times(
        self, tokens: int, rows: int, outputs: int, all_tokens: int = 0, all_outputs: int = 0
    ) -> list[OpTime]:
        """Run once and measure each stage."""
        ...


class NotRecordable(Exception):
    """The work does something else than the recorder's ops."""


class Recorder(Protocol):
    """Records ops as programs; some toolkits have one."""

    @property
    def is_recording(self) -> bool:
        """Whether calls are being recorded instead of run."""
        ...

    def record(
        self, work: Callable[[], Tensor], tokens: int, outputs: int, replicas: int = 1
    ) -> Recording:
        """Record the ops and views of `work`.

        Its inputs are tensors at fixed addresses. Their leading dimension is `tokens` or `outputs`,
        which must differ, or `replicas` times that if several replicas share a batch.

        Raises:
            NotRecordable: it does something else.
        """
        ...

    def wake_next(self, wake_fd: int) -> None:
        """Write to this eventfd once, when the next ops run. Call it on the thread that runs
        them."""
        ...


class Ops(
    ExpertOps,
    StateOps,
    AdapterOps,
    AdapterRowOps,
    LogitOps,
    RotaryOps,
    FeatureOps,
    IndexOps,
    PrologueOps,
    Protocol,
):
    """One bound kernel per op, chosen at start; calls do not dispatch."""

    @property
    def recorder(self) -> Recorder | None:
        """Records these ops; None = they can only run at once."""
        ...

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the K/V pages that these ops write and read."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension, the mean in fp32.

        x: [tokens, dim] or [tokens, heads, dim] T, tokens may lie apart (part of a wider row);
        weight: [dim] T.
        returns: T, shape of x.
        """
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Add to the residual stream and normalise it: rms_norm(x + residual), x + residual.

        x, residual: [tokens, dim] T; weight: [dim] T. Neither input is changed.
        returns: normed [tokens, dim] T, sum [tokens, dim] T.
        """
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias, mean and variance in fp32.

        x: [tokens, dim] T; weight: [dim] T; bias: [dim] T or None.
        returns: [tokens, dim] T.
        """
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y, both [tokens, dim] T; neither is changed."""
        ...

    def silu_and_mul(self, gate_up: Tensor, limit: float = math.inf) -> Tensor:
        """silu(gate) · up, gate and up lying side by side.

        gate_up: [tokens, 2·dim] T; limit: most that silu(gate) is, and the up to either side.
        returns: [tokens, dim] T.
        """
        ...

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) · up with the exact (erf) gelu; shapes as silu_and_mul."""
        ...

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        """gelu(gate) · up with the tanh approximation; shapes as silu_and_mul."""
        ...

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """gelu with the tanh approximation, for feed-forward blocks without a gate.

        x: [tokens, dim] T.
        returns: [tokens, dim] T.
        """
        ...

    def select_rows(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Some rows of x, in the order of `chosen`.

        x: [tokens, dim] T; chosen: [n] int64.
        returns: [n, dim] T.
        """
        ...

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Parts [tokens, …] T side by side, for projections stored in several types.

        returns: [tokens, sum of the widths] T.
        """
        ...

    def pack_embedding(
        self, weight: StoredWeight, first: int, last: int, scale: float = 1.0
    ) -> PackedEmbedding:
        """Prepare the rows first … last − 1 of a weight [ids, dim] for look-up by id.

        Called at load, once. A kernel may keep the blocks of the mapped file and unpack only the
        rows it looks up.

        scale: factor on every row.
        """
        ...

    def pack_linear(self, weight: StoredWeight, is_head: bool = False) -> PackedLinear:
        """Convert a weight [out, in] to the form of the kernel chosen for its storage type.

        Called at load, once per weight. A kernel may round float weights if the user allowed it.

        is_head: its outputs are logits, which tolerate less rounding than other activations.
        """
        ...

    def pack_head_linear(self, weight: StoredWeight, may_round: bool) -> PackedHeadLinear:
        """Prepare a float matrix per head, [heads, out, in].

        Called at load, once per weight.

        may_round: the checkpoint stores it in quantised blocks, so half precision is accurate
            enough; a kernel that rounds activations may use it.
        """
        ...

    def write_latent(
        self,
        latent: Tensor,
        key: Tensor,
        latent_pages: Tensor,
        key_pages: Tensor,
        flat_locations: Tensor,
    ) -> None:
        """Store what latent attention keeps of this step's tokens; the pages change in place.

        latent: [tokens, rank] T; key: [tokens, rope_dim] T, both may lie apart by token;
        latent_pages, key_pages: [num_pages, page_size, stored_width] of the cache dtype;
        flat_locations: as for write_kv.
        """
        ...

    def choose_positions(
        self,
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
        """The positions that each token reads: the `top` best scores up to its own position, lower
        positions first among equal scores; all positions if there are at most `top`
        (DeepSeek-V3.2-Exp, section 2.1). A position's score is Σ over the heads of weight · relu(q
        · key + q_turned · turned).

        q, q_turned: [tokens, heads, width of a part] T; weights: [tokens, heads] T;
        key_pages, turned_pages: as for write_latent; first: positions before it are not chosen, and
        no row begins there. Kernels may ignore it on devices without drafts; paths: as for
        paged_attention.
        returns: [tokens, words] int32, bit p % 32 of word p // 32 for position p; or whatever else
        the `latent_attention` of the same device takes.
        """
        ...

    def latent_attention(
        self,
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
        """As paged_attention without window and cap, where all heads share one latent vector and
        one rotated key per token: logits are scale · (q · latent + q_turned · key), values are the
        latents (DeepSeek-V2, arXiv 2405.04434, appendix C).

        q: [tokens, heads, rank] T; q_turned: [tokens, heads, rope_dim] T;
        latent_pages, key_pages: as for write_latent; chosen: what each token reads of the positions
        up to its own, as `choose_positions` returns it, None = all;
        first: positions before it are not seen, and no row begins there. Kernels need not take it
        on devices where nothing is drafted; paths: as for paged_attention.
        returns: [tokens, heads, rank] T, softmax and sums in fp32.
        """
        ...

    def write_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        flat_locations: Tensor,
        unit: float = 1.0,
    ) -> None:
        """Store k and v of this step's tokens; k_pages and v_pages change in place.

        k, v: [tokens, kv_heads, head_dim] T;
        k_pages, v_pages: [num_pages, page_size, kv_heads, stored_width] of the cache dtype
        (`ops/pages.py`; head_dim unless that is int8);
        flat_locations: [tokens] int64, page · page_size + offset. Several tokens may share a
        location of page 0 (padding); what remains there is one of them;
        unit: what numbers in pages of floats of 8 bits are multiples of. Kernels that read no such
        pages need not take it.
        """
        ...

    def move_kv(self, k_pages: Tensor, v_pages: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Bring K and V of some tokens to other places, all at once; k_pages and v_pages, as for
        write_kv, change in place.

        sources, targets: [n] int64, as flat_locations of write_kv.
        """
        ...

    def paged_attention(
        self,
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
        """Causal attention of rows of any count over their pages, this step's K and V included.

        Token j of row r has position p = context_lengths[r] + j and sees the positions
        max(0, p − window + 1) … p. With window 0 it sees all positions up to p; with window < 0,
        the positions from −window on, and no row begins before that (kernels may ignore this on
        devices without drafts). Other positions are never read as numbers, so pages may contain
        anything there. Query head h uses kv head h // (heads/kv_heads).

        q: [tokens, heads, head_dim] T, row r owns row_starts[r] … row_starts[r + 1] − 1; k_pages,
        v_pages: [num_pages, page_size, kv_heads, stored_width] of the cache dtype (`ops/pages.py`;
        head_dim unless that is int8); page_tables: [rows, max_pages] int32; row_starts: [rows + 1]
        int32; context_lengths: [rows] int32, positions before this step's tokens; both on the host
        where `Traits.lengths_on_host`; scale: factor on q·k; soft_cap: logits become
        cap·tanh(logits/cap), 0 = off. sinks: [heads] fp32, a logit of each head that counts in the
        softmax and has no value; unit: as for write_kv; paths: [tokens, 2 + most] int32, for
        branching drafts: base, length, and the location of each
            of the positions base … base + length − 1 of the token's past; the last is the token
            itself. So the token has position base + length − 1. Length 0 = the token's position is
            its location; None = length 0 for all tokens. Either all tokens of a row have a path, or
            none. A token reads the same values in the same order as in a chain without branches.
            Kernels may ignore it on devices without drafts.
        ends: [tokens] int32, for spans whose tokens see each other: position after the last one
            that a token sees, within its row; 0 = the position after its own; None = 0 for all
            tokens. Only kernels with `Kernel.sees_ahead` are given it.
        returns: [tokens, heads, head_dim] T, softmax and sums in fp32.
        """
        ...

    def sample(self, logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
        """Choose one token per row, `sample_row` of ops/sampling.py token for token, and enter it
        into `rows.history`.

        logits: [rows, vocab] fp32, left as they are.
        returns: tokens [rows] int64; best [rows] fp32, the largest logit after all edits: where it
        is not finite the row cannot be chosen from, and its token is any id of the vocabulary.
        """
        ...

    def logprobs(
        self,
        logits: Tensor,
        rows: Tensor,
        temperatures: Tensor,
        tokens: Tensor,
        top: int,
        picked: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-softmax of logits / temperature at some tokens, and the most likely ones.

        logits: [rows, vocab] fp32; rows: [n] int64, the row of each entry; temperatures: [n] fp64;
        tokens: [n] int64; top: at most the vocabulary; picked: [n, ids] int64.
        returns: of each token [n] fp32; ids of the top [n, top] int32, best first, the lower id
        first among equals; theirs [n, top] fp32; of the picked ids [n, ids] fp32. All are NaN in an
        entry whose largest logit is not finite.
        """
        ...


OP_NAMES = (
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "add",
    "rotary_angles",
    "rotary",
    "norm_rotary",
    "silu_and_mul",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gelu_tanh",
    "select_rows",
    "take_rows",
    "spread_columns",
    "concat",
    "sigmoid_scale",
    "scale_logits",
    "embedding",
    "linear",
    "write_kv",
    "move_kv",
    "paged_attention",
    "head_linear",
    "route",
    "experts",
    "place_experts",
    "combine_experts",
    "write_latent",
    "latent_attention",
    "choose_positions",
    "apply_gate",
    "short_conv",
    "decay_gates",
    "scan",
    "selective_scan",
    "adapt",
    "adapt_rows",
    "sample",
    "logprobs",
)
"""The names a table of kernels and a forced choice may use."""

PACKED_OPS = ("embedding", "linear", "experts", "head_linear")
"""The ops with a weight, called through what `pack_<op>` returns."""

TYPED_OPS = ("embedding", "linear")
"""Packed ops whose kernel is chosen per storage type."""
