"""What sampling and log-probabilities mean, in plain numpy: the definition that kernels equal.

A token is a pure function of (logits row, parameters, quantile). Its weight is e^-x, x nats below
the best token, as a fixed row of fp32 roundings, and weights are added up as integers, so that
every order of adding, every instruction set and every batch gives the same token bit for bit.

Randomness is counter-based: the quantile of a position is a hash of (seed, position), so a token is
the same alone, in a batch, and when it is computed again. The hash is SplitMix64's output function
(Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from banyan.ops.host_memory import copy_to

PARAMS = np.dtype(
    [
        ("prompt_len", np.int64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("min_new", np.int64),
        ("frequency", np.float64),
        ("presence", np.float64),
        ("repetition", np.float64),
        ("greedy", np.bool_),
        ("penalised", np.bool_),
        ("biased", np.bool_),
    ],
    align=True,
)
"""Sampling parameters of one request. `temperature` is 1 if it is greedy; `penalised`, `biased`: it
has penalties, biases. Bans for `min_new` and biases come to a kernel as Addends."""

WEIGHT_BITS = 44
"""The best token weighs 2**44, so what lies more than 31 nats below it weighs nothing; all such
tokens together have less than 2**-26 of the probability."""
MAX_VOCAB = (1 << (63 - WEIGHT_BITS)) - 1
"""Tokens whose weights together fit into an int64."""

VANISHED = 58.0
"""Bits below the best token where every weight rounds to 0."""
POWERS = (
    1.3264727302595286e-3,
    9.671512728701554e-3,
    5.550733743811287e-2,
    2.4022242084016499e-1,
    6.93146977598356e-1,
    1.0,
)
"""2**f on [-0.5, 0.5] as a polynomial of f, highest power first, with relative error below 1e-7."""
MIX = (0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
_QUANTILE_BITS = 64
_MASK = 0xFFFF_FFFF_FFFF_FFFF
GOLDEN = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True)
class Addends:
    """Numbers to add to single logits: biases, and -inf for banned tokens.

    Attributes:
        offsets: [rows + 1] int64, the part of each row in the others.
        ids: int32; values: float32.
    """

    offsets: Tensor
    ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, offsets: np.ndarray, ids: np.ndarray, values: np.ndarray) -> "Addends":
        """From arrays of the host, whose memory it shares."""
        return cls(*map(torch.from_numpy, (offsets, ids, values)))

    def to(self, device: torch.device) -> "Addends":
        return Addends(*(copy_to(x, device) for x in (self.offsets, self.ids, self.values)))


@dataclass(frozen=True)
class Masks:
    """Bits of allowed tokens, little-endian, bit i = token i.

    Attributes:
        of_row: [rows] int32, index into `bits`, -1 for a row without.
        bits: [masks, bytes] uint8, covering the vocabulary.
    """

    of_row: Tensor
    bits: Tensor

    @classmethod
    def of(cls, of_row: np.ndarray, bits: np.ndarray) -> "Masks":
        """From arrays of the host, whose memory it shares."""
        return cls(torch.from_numpy(of_row), torch.from_numpy(bits))

    def to(self, device: torch.device) -> "Masks":
        return Masks(copy_to(self.of_row, device), copy_to(self.bits, device))


def params_tensor(params: np.ndarray) -> Tensor:
    """Parameters as bytes, sharing their memory. params: [slots] PARAMS; returns: [slots, bytes]
    uint8."""
    return torch.from_numpy(params.view(np.uint8).reshape(len(params), PARAMS.itemsize))


@dataclass(frozen=True)
class SampleRows:
    """How each row is sampled. Tensors lie on the device of the logits.

    Attributes:
        params: [slots, bytes] uint8, a PARAMS each.
        positions: [rows] int64, where the token goes.
        slots: [rows] int64, where each row's entries of `params` and `history` are.
        history: [slots, longest] int32, the tokens of each slot below its position; the chosen
            one is entered there.
        host_params: [slots] PARAMS, the same on the host; host_slots: [rows], the same there. A
            kernel may look there for work that no row asks for.
        longest: no position is larger.
    """

    params: Tensor
    positions: Tensor
    slots: Tensor
    history: Tensor
    addends: Addends | None
    masks: Masks | None
    host_params: np.ndarray
    host_slots: np.ndarray
    longest: int

    @classmethod
    def of(
        cls,
        params: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        history: Tensor,
        addends: Addends | None = None,
        masks: Masks | None = None,
    ) -> "SampleRows":
        """From arrays of the host, whose memory it shares."""
        places = torch.from_numpy(positions), torch.from_numpy(slots)
        longest = history.shape[1]
        return cls(params_tensor(params), *places, history, addends, masks, params, slots, longest)

    def on_host(self) -> "SampleRows":
        """The same, all but the history on the host."""
        host = torch.device("cpu")
        return replace(
            self,
            positions=self.positions.to(host),
            addends=None if self.addends is None else self.addends.to(host),
            masks=None if self.masks is None else self.masks.to(host),
        )

    def asked(self, name: str) -> np.ndarray:
        """One parameter of each row, on the host."""
        return self.host_params[name][self.host_slots]

    @property
    def are_plain(self) -> bool:
        """Does every row take the best of its raw logits?"""
        if self.addends is not None or self.masks is not None:
            return False
        return bool((self.asked("greedy") & ~self.asked("penalised")).all())


def quantile(seed: int, position: int) -> int:
    """A number in [0, 2**64) that depends on both arguments alone."""
    state = _mix((seed & _MASK) + GOLDEN)
    return _mix((state ^ position) + GOLDEN)


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * MIX[0]) & _MASK
    z = ((z ^ (z >> 27)) * MIX[1]) & _MASK
    return z ^ (z >> 31)


def weights(below: np.ndarray, temperature: float) -> np.ndarray:
    """e^(-below / temperature) in units of 2**-44; below: float32, from 0 to infinity.

    returns: int64.
    """
    one = np.float32
    with np.errstate(over="ignore"):
        x = np.maximum(below * one(-1.4426950408889634 / temperature), one(-VANISHED))
    n = np.rint(x)
    f = x - n
    p = np.full(f.shape, POWERS[0], np.float32)
    for power in POWERS[1:]:
        p = p * f + one(power)
    weight = (p.view(np.int32) + (n.astype(np.int32) << 23)).view(np.float32)
    return np.rint(weight.astype(np.float64) * (1 << WEIGHT_BITS)).astype(np.int64)


def support(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """The weight of every token, 0 = filtered out: [vocab] int64.

    All three filters apply to the distribution at `temperature`: the top_k largest weights; the
    smallest set of largest weights that reaches top_p of the sum; weights of at least min_p times
    the largest. Tokens with equal logits are kept or dropped together, so the result does not
    depend on how a sort orders ties.

    logits: [vocab] float32 with a finite maximum.
    """
    below = np.max(logits) - logits
    weight = weights(below, temperature)
    last = np.inf
    if 0 < top_k < len(logits):
        last = np.partition(below, top_k - 1)[top_k - 1]
    if top_p < 1.0:
        wanted = max(1, int(top_p * float(weight.sum())))
        order = np.argsort(below, kind="stable")
        last = min(last, below[order[np.searchsorted(np.cumsum(weight[order]), wanted)]])
    keep = (below <= last) & (weight >= int(min_p * (1 << WEIGHT_BITS)))
    return np.where(keep, weight, 0)


def draw(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, at: int
) -> int:
    """The token at the quantile at / 2**64 of the filtered distribution, in the order of ids.

    logits: [vocab] float32 with a finite maximum; at: in [0, 2**64).
    """
    mass = np.cumsum(support(logits, temperature, top_k, top_p, min_p))
    return int(np.searchsorted(mass, int(mass[-1]) * at >> _QUANTILE_BITS, side="right"))


def relaxed_token(
    token: int, draft: int, weight: np.ndarray, at: int, single: float, total: float
) -> int:
    """`draft` where the thresholds accept it in place of the sampled `token`, else that.

    A draft of probability p is accepted if p >= single, else with the probability p / total.

    Args:
        weight: as `support` gives it.
        at: in [0, 2**64), another quantile than the one that `token` was drawn at.
    """
    p = int(weight[draft]) / int(weight.sum())
    if token == draft or p >= single and p > 0:
        return draft
    wanted = min(1.0, p / total) if total > 0 else float(p > 0)
    # The draft was not sampled, which has the probability 1 - p: the rest is accepted here.
    return draft if at * (1 - p) < (wanted - p) * (1 << _QUANTILE_BITS) else token


def penalise(
    logits: np.ndarray,
    tokens: np.ndarray,
    prompt_len: int,
    frequency: float,
    presence: float,
    repetition: float,
) -> None:
    """Lower the logits of tokens that were there before.

    logits: [vocab] float32; tokens: [known] int32, prompt and output.
    frequency: subtracted once per occurrence in the output; presence: subtracted once from what
    occurs in the output; repetition: divides positive and multiplies negative logits of what
    occurs in prompt or output (Keskar et al., CTRL, 2019).
    """
    if frequency or presence:
        ids, counts = np.unique(tokens[prompt_len:], return_counts=True)
        logits[ids] -= np.float32(frequency) * counts.astype(np.float32) + np.float32(presence)
    if repetition != 1.0:
        ids = np.unique(tokens)
        before = logits[ids]
        scale = np.float32(repetition)
        logits[ids] = np.where(before > 0, before / scale, before * scale)


def banned(bits: np.ndarray, vocab_size: int) -> np.ndarray:
    """Which tokens a mask forbids: [vocab] bool; bits: uint8 that cover the vocabulary."""
    return np.unpackbits(bits, count=vocab_size, bitorder="little") == 0


def sample_row(logits: np.ndarray, rows: SampleRows, row: int) -> tuple[int, float]:
    """The token of one row, and its largest logit after penalties, bans and biases.

    The order is frequency, presence, repetition, then bans, masks and biases, then temperature,
    then top_k, top_p and min_p jointly. A largest logit that is not finite can be chosen from by
    nobody: the token is then 0; one NaN makes it NaN.

    logits: [vocab] float32, left as they are.
    """
    slot, position = int(rows.host_slots[row]), int(rows.positions[row])
    params = rows.host_params[slot]
    logits = logits.copy()
    if params["penalised"]:
        tokens = rows.history[slot, :position].cpu().numpy()  # sync: on the host
        penalise(
            logits,
            tokens,
            int(params["prompt_len"]),
            *(float(params[name]) for name in ("frequency", "presence", "repetition")),
        )
    if rows.masks is not None and rows.masks.of_row[row] >= 0:
        bits = rows.masks.bits[rows.masks.of_row[row]].numpy()
        logits[banned(bits, len(logits))] = -np.inf
    if rows.addends is not None:
        part = slice(*rows.addends.offsets[row : row + 2].tolist())
        np.add.at(logits, rows.addends.ids[part].numpy(), rows.addends.values[part].numpy())
    token = int(np.argmax(logits))
    best = float(logits[token])
    if not math.isfinite(best):
        return 0, best
    if params["greedy"]:
        return token, best
    at = quantile(int(params["seed"]), position)
    filters = (float(params["temperature"]), int(params["top_k"]))
    return draw(logits, *filters, float(params["top_p"]), float(params["min_p"]), at), best


def log_softmax_at(logits: np.ndarray, temperature: float, ids: np.ndarray) -> np.ndarray:
    """Log-probabilities of some tokens at a temperature: float32, shape of ids.

    logits: [vocab] float32. NaN where the largest logit is not finite.
    """
    best = np.max(logits)
    if not np.isfinite(best):
        return np.full(ids.shape, np.nan, np.float32)
    total = float(weights(best - logits, temperature).sum()) / (1 << WEIGHT_BITS)
    near = (logits[ids].astype(np.float64) - float(best)) / temperature
    return (near - math.log(total)).astype(np.float32)


def top_tokens(logits: np.ndarray, count: int) -> np.ndarray:
    """The `count` most likely tokens, best first, the lower id first among equals: int32."""
    return np.argsort(np.max(logits) - logits, kind="stable")[:count].astype(np.int32)
