"""Rules 4 to 10, 17, 18, 20 and 21: experts, what ranks send each other, how ranks are split."""

from collections.abc import Iterator
from dataclasses import dataclass

from banyan.ascend.launch.facts import Breach, Launch, LaunchModel, breach

FUSED = "SGLANG_NPU_FUSED_MOE_MODE"
DISPATCH = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
_FUSEEP = "ascend_fuseep"
_MOST_DISPATCH = 1024
_USUAL_DISPATCH = 128
"""Tokens of one rank in one exchange, where nobody says."""
_FUSED_DISPATCH = (256, 1024)
"""The most of them that operators take which run the experts too, by mode."""
_DEFAULT_BUFFER_MB = 200
_LONG_ROUNDS, _LONG_TOKENS = "DEEPEP_NORMAL_LONG_SEQ_ROUND", 32768
MIB = 1 << 20


def fused(launch: Launch) -> Iterator[Breach]:
    mode, exchange = launch.variable(FUSED), launch.exchange
    if mode and mode not in ("1", "2"):
        yield breach("4a", value=mode)
    elif mode:
        quantization = launch.text("quantization", "none")
        if mode == "2" and quantization not in ("modelslim", "w8a8_int8"):
            yield breach("4b", value=quantization)
        if exchange != _FUSEEP:
            yield breach("4c", value=mode, backend=exchange)
    if exchange == _FUSEEP:
        if not launch.soc.fuses_experts:
            yield breach("4d", soc=launch.soc.name)
        if launch.text("dtype") in ("float16", "half"):
            yield breach("4e")


def fused_mode(launch: Launch) -> int:
    """Which operator sends rows and runs the experts too; 0 = none does."""
    if launch.exchange != _FUSEEP or not launch.soc.fuses_experts:
        return 0
    return 2 if launch.variable(FUSED) == "2" else 1


def latent(launch: Launch) -> Iterator[Breach]:
    fractal, prologue = "SGLANG_USE_FIA_NZ", "SGLANG_NPU_USE_MLAPO"
    if launch.is_set(fractal) and not launch.is_set(prologue):
        yield breach("5a")
    model = launch.model
    if model is not None and not model.is_latent:
        for name in (fractal, prologue):
            if launch.is_set(name):
                yield breach("5b", name=name, model=model.name)
    if model is not None and model.is_sparse and launch.is_set(fractal):
        yield breach("5c", model=model.name)


def two_streams(launch: Launch) -> Iterator[Breach]:
    model = launch.model
    if model is None:
        return
    if launch.is_set("SGLANG_NPU_USE_MULTI_STREAM") and not model.shared_experts:
        yield breach("6a", model=model.name, experts=model.experts, shared=model.shared_experts)
    if launch.is_set("SGLANG_USE_AG_AFTER_QLORA") and not model.q_rank:
        yield breach("6b", model=model.name)


def dispatch(launch: Launch) -> Iterator[Breach]:
    """Rules 7 and 8."""
    text, mode = launch.variable(DISPATCH), launch.deepep_mode
    if not text:
        return
    value = launch.count(DISPATCH)
    if value is None or not 0 <= value <= _MOST_DISPATCH:
        yield breach("7a", value=text)
        return
    if fused_mode(launch):
        yield from _fused_dispatch(launch, value)
    if launch.exchange != "deepep":
        return
    if value == 0 and mode != "normal":
        yield breach("7b", mode=mode)
    limit = launch.soc.dispatch_tokens
    if mode != "normal" and value > limit:
        yield breach("7c", value=value, soc=launch.soc.name, limit=limit)
    if mode != "normal" and value:
        yield from _capacity(launch, value)


def _fused_dispatch(launch: Launch, value: int) -> Iterator[Breach]:
    mode = fused_mode(launch)
    limit = _FUSED_DISPATCH[mode - 1]
    if value == 0:
        yield breach("7d", limit=limit)
    elif value > limit:
        yield breach("7e", value=value, mode=mode, limit=limit)
    elif (needed := _step_tokens(launch)) > value:
        yield breach("8c", needed=needed, calls=-(-needed // value), value=value)


def _step_tokens(launch: Launch) -> int:
    """Tokens of one rank in a step of answers; 0 = nobody said."""
    running = launch.running_per_replica or launch.number("cuda-graph-max-bs")
    return -(-running * launch.draft_tokens // launch.attention_ranks)


def _capacity(launch: Launch, value: int) -> Iterator[Breach]:
    drafts, ranks = launch.draft_tokens, launch.attention_ranks
    running = launch.running_per_replica or launch.number("cuda-graph-max-bs")
    needed = _step_tokens(launch)
    if needed > value:
        yield breach("8a", running=running, drafts=drafts, ranks=ranks, needed=needed, value=value)
    most = launch.number("max-running-requests")
    extra = drafts if launch.number("speculative-num-draft-tokens") else 0
    if most * (1 + extra) > value:
        yield breach("8b", running=most, drafts=extra, needed=most * (1 + extra), value=value)


@dataclass(frozen=True)
class Buffer:
    """HCCL's buffer in MB, given and needed, for the tokens of one rank in one exchange.

    Attributes:
        fits: the most tokens that the given one is large enough for.
    """

    given: int
    needed: int
    tokens: int
    fits: int
    ep: int
    experts: int
    hidden: int

    @property
    def line(self) -> str:
        return (
            f"{self.tokens} tokens a rank on {self.ep} ranks need {self.needed} of the "
            f"{self.given} MB of HCCL's buffer; {self.fits} tokens fit"
        )


def buffer_of(launch: Launch) -> Buffer | None:
    """What sending rows to experts at once needs; None where they are not, or facts are absent."""
    model, value, mode = launch.model, launch.count(DISPATCH), fused_mode(launch)
    value = _USUAL_DISPATCH if value is None else value
    is_at_once = mode or (launch.exchange == "deepep" and launch.deepep_mode != "normal")
    if model is None or value < 1 or not is_at_once or not model.experts:
        return None
    first, second = launch.count("DEEPEP_HCCL_BUFFSIZE"), launch.count("HCCL_BUFFSIZE")
    given, soc = first or second or _DEFAULT_BUFFER_MB, launch.soc.name
    return Buffer(
        given=given,
        needed=-(-buffer_bytes(soc, value, launch.ep, model, mode) // MIB),
        tokens=value,
        fits=tokens_that_fit(soc, given, launch.ep, model, mode),
        ep=launch.ep,
        experts=model.experts,
        hidden=model.hidden,
    )


def buffer(launch: Launch) -> Iterator[Breach]:
    found = buffer_of(launch)
    if found is not None and found.needed > found.given:
        yield breach("9a", **vars(found))


def buffer_bytes(soc: str, tokens: int, ep: int, model: LaunchModel, fused: int = 0) -> int:
    """What the exchange of experts needs of the HCCL buffer.

    Args:
        tokens: of one rank in one exchange.
        ep: ranks that share the experts.
        fused: by `fused_mode`. The first operator of these has no formula of its own, and counts as
            the exchange that it makes; the second one's counts rows of 8 bits.
    """
    local = -(-model.experts // ep)
    token_bytes = 2 * model.hidden
    if fused == 2:
        return 3 * tokens * model.experts_per_token * model.hidden + 10 * MIB
    if soc == "A2":
        each = min(local, model.experts_per_token)
        return 2 * (tokens * ep * each * token_bytes + 2 * MIB)
    sent = _aligned(_aligned(token_bytes, 32) + 64, 512)
    returned = model.experts_per_token * tokens * _aligned(token_bytes, 512)
    return 2 * (local * tokens * ep * sent + returned)


def tokens_that_fit(soc: str, buffer_mb: int, ep: int, model: LaunchModel, fused: int = 0) -> int:
    """The most tokens of one rank for which a buffer is large enough."""
    there = buffer_mb * MIB
    counts = range(1, _MOST_DISPATCH + 1)
    return sum(buffer_bytes(soc, count, ep, model, fused) <= there for count in counts)


def _aligned(size: int, step: int) -> int:
    return -(-size // step) * step


def modes(launch: Launch) -> Iterator[Breach]:
    if launch.exchange != "deepep":
        return
    if launch.role == "prefill" and launch.deepep_mode == "low_latency":
        yield breach("10a")
    if launch.role == "decode" and launch.deepep_mode == "normal" and launch.has_graphs:
        yield breach("10b")


def split(launch: Launch) -> Iterator[Breach]:
    """Rule 17."""
    tp, dp, ep = launch.tp, launch.dp, launch.ep
    uses_dp_attention = launch.is_on("enable-dp-attention")
    skips = launch.is_set("SGLANG_SCHEDULER_SKIP_ALL_GATHER")
    if uses_dp_attention and tp % dp:
        yield breach("17a", tp=tp, dp=dp)
    if launch.is_on("enable-dp-lm-head") and not uses_dp_attention:
        yield breach("17b")
    if skips and not uses_dp_attention:
        yield breach("17c")
    if (
        launch.number("moe-dense-tp-size") == 1
        and not uses_dp_attention
        and launch.cp == 1
        and tp > 1
    ):
        yield breach("17d")
    balance = launch.text("load-balance-method", "round_robin")
    if skips and balance not in ("round_robin", "auto"):
        yield breach("17e", value=balance)
    if tp % ep:
        yield breach("17f", ep=ep, tp=tp)
    elif launch.exchange != "none" and ep != tp:
        yield breach("17g", backend=launch.exchange, tp=tp, ep=ep)
    redundant = launch.number("ep-num-redundant-experts")
    if launch.model is not None and launch.model.experts and ep > 1:
        total = launch.model.experts + redundant
        if total % ep:
            experts = launch.model.experts
            yield breach("17h", experts=experts, redundant=redundant, ep=ep, total=total)


def context_parallel(launch: Launch) -> Iterator[Breach]:
    is_on, mode = launch.is_on(_CP), launch.text("nsa-prefill-cp-mode")
    if is_on and launch.model is not None and not launch.model.is_sparse:
        yield breach("18a", model=launch.model.name)
    dp = launch.dp if launch.is_on("enable-dp-attention") else 1
    if launch.cp > 1 and launch.tp % (launch.cp * dp):
        yield breach("18b", tp=launch.tp, cp=launch.cp, dp=dp, shared=launch.cp * dp)
    running = launch.number("max-running-requests")
    if is_on and mode == "zigzag" and running != 1:
        yield breach("18c", running=running or "not given")
    if mode and not is_on:
        yield breach("18d")
    if is_on and launch.role == "decode":
        yield breach("18e")


_CP = "enable-nsa-prefill-context-parallel"


def normal_tokens(launch: Launch) -> Iterator[Breach]:
    tokens = launch.number("max-prefill-tokens")
    if launch.exchange != "deepep" or launch.deepep_mode != "normal" or not tokens:
        return
    ranks = launch.cp if launch.cp > 1 else launch.attention_ranks
    is_far = launch.nodes > 1
    limit = launch.soc.far_tokens if is_far else launch.soc.normal_tokens
    if launch.soc.fuses_experts and (launch.count(_LONG_ROUNDS) or 1) > 1:
        limit = _LONG_TOKENS
    each = -(-tokens // ranks)
    if each > limit:
        where = " between machines" if is_far and limit < launch.soc.normal_tokens else ""
        yield breach(
            "20a",
            tokens=tokens,
            ranks=ranks,
            each=each,
            soc=launch.soc.name,
            limit=limit,
            where=where,
            most=limit * ranks,
        )


def int8_dispatch(launch: Launch) -> Iterator[Breach]:
    if not launch.is_set("DEEP_NORMAL_MODE_USE_INT8_QUANT"):
        return
    if launch.exchange != "deepep":
        yield breach("21a", why=f"--moe-a2a-backend is {launch.exchange}")
    elif launch.deepep_mode == "low_latency":
        yield breach("21a", why="--deepep-mode is low_latency")


EXPERT_RULES = (
    *(fused, latent, two_streams, dispatch, buffer, modes),
    *(split, context_parallel, normal_tokens, int8_dispatch),
)
