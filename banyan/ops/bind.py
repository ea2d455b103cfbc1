"""Chooses one kernel per op, once at start-up, and reports why the others declined.

The candidates are the tables of `ops/<device>/__init__.py` (best first) and the reference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.base.table import Table
from banyan.ops import reference
from banyan.ops.activation_quant import STATIC
from banyan.ops.api import (
    OP_NAMES,
    PACKED_OPS,
    TYPED_OPS,
    IndexShape,
    LatentPrologue,
    Ops,
    Peaks,
    PrologueShape,
    Recorder,
)
from banyan.ops.stored import E4M3, E4M3_DYNAMIC, STORAGE_TYPES, StoredWeight

log = logger(__name__)

REFERENCE = "reference"
PLAIN_PAGES = "token by token"
"""Page layout of the reference: [page_size, kv_heads, head_dim]."""
PREFILL, DECODE = "prefill", "decode"
"""Phases of a row: it has several tokens, or one."""
ON_PAGES = ("write_kv", "move_kv", "paged_attention")
"""Ops that must agree on the layout of a page."""
ON_LATENTS = ("write_latent", "latent_attention", "choose_positions")
"""Ops instead of those if pages keep latents."""
WAITING_REFERENCES = (
    "paged_attention",
    "latent_attention",
    "choose_positions",
    "experts",
    "combine_experts",
    "short_conv",
    "scan",
    "selective_scan",
)
"""Ops whose reference copies numbers from the device, once per row or expert."""


class Toolkit(Protocol):
    """State that a device's kernels share, such as a compiled library."""

    @property
    def absence(self) -> str:
        """Why there are no compiled kernels; "" = they exist."""
        ...

    @property
    def recorder(self) -> Recorder | None:
        """Records ops as programs for any size; None = not supported."""
        ...

    def cache_dtype(self, dtype: torch.dtype, exact: bool) -> torch.dtype:
        """Default dtype of K/V pages for activations of `dtype`."""
        ...

    def joins_index(self, shape: IndexShape) -> bool:
        """Whether pages keep both parts of the indexer's keys next to each other."""
        ...

    def open_prologue(
        self, shape: PrologueShape, dtype: torch.dtype, device: torch.device
    ) -> LatentPrologue | None:
        """One fused operator for everything before latent attention; None = not wanted, or not for
        this shape."""
        ...


@dataclass(frozen=True)
class NoToolkit:
    """Toolkit of a device whose kernels share nothing."""

    absence: str = "compiled kernels were not asked for"
    recorder: Recorder | None = None

    def cache_dtype(self, dtype: torch.dtype, exact: bool) -> torch.dtype:
        return dtype

    def joins_index(self, shape: IndexShape) -> bool:
        return False

    def open_prologue(
        self, shape: PrologueShape, dtype: torch.dtype, device: torch.device
    ) -> LatentPrologue | None:
        return None


NO_TOOLKIT = NoToolkit()


@dataclass(frozen=True)
class OpSpec:
    """Requirements on a kernel.

    Attributes:
        op: a name of OP_NAMES.
        dtype: activation dtype.
        features: the device's features (`Traits.features`).
        head_dim: width of an attention head.
        weight_type: storage type of the weight, for TYPED_OPS only.
        exact: activations must not be rounded below `dtype`.
        cache_dtype: dtype of the K/V pages.
        page_size: tokens of a page.
        is_head: the outputs are logits.
        sees_ahead: tokens of a span may see later ones (`ends` of `paged_attention`).
        toolkit: the device's toolkit.
    """

    op: str
    device: torch.device
    dtype: torch.dtype
    features: frozenset[str]
    head_dim: int
    weight_type: str = ""
    exact: bool = False
    cache_dtype: torch.dtype = torch.float32
    page_size: int = 16
    is_head: bool = False
    sees_ahead: bool = False
    toolkit: Toolkit = NO_TOOLKIT

    @property
    def label(self) -> str:
        op = f"{self.op} to logits" if self.is_head else self.op
        return f"{op}[{self.weight_type}]" if self.weight_type else op


@dataclass(frozen=True)
class Kernel:
    """A candidate for one op.

    Attributes:
        supports: None = it supports the spec, otherwise the reason why not.
        run: the op's function of `ops/api.py`; for PACKED_OPS a packer that takes (weight, dtype,
            device) and what else `pack_<op>` takes.
        make: instead of `run`, makes that function from the device's toolkit.
        rounds_activations: it rounds activations to fewer bits, for speed.
        pages: name of its layout of K/V in a page; all ops on pages must have the same.
        waits: it copies numbers from the device, so a step with it cannot be captured.
        plain_pages: turns K and V pages of its layout into plain ones, for PLAIN_PAGES None.
        sees_ahead: attention that takes `ends`.
        keeps: storage types that experts keep although projections do not.
    """

    supports: Callable[[OpSpec], str | None]
    run: Callable[..., object] | None = None
    make: Callable[[Any], Callable[..., object]] | None = None
    rounds_activations: bool = False
    pages: str = PLAIN_PAGES
    waits: bool = False
    plain_pages: Callable[..., object] | None = None
    sees_ahead: bool = False
    keeps: tuple[str, ...] = ()

    def function(self, toolkit: object) -> Callable[..., object]:
        """The function, bound to the toolkit if it needs one."""
        if self.make is not None:
            return self.make(toolkit)
        assert self.run is not None
        return self.run

    def declines(self, spec: OpSpec) -> str | None:
        """Why it does not support `spec`; None = it does."""
        if spec.exact and self.rounds_activations:
            return "rounds activations, exact ones were asked for"
        if spec.sees_ahead and spec.op == "paged_attention" and not self.sees_ahead:
            return "tokens of a span see later ones, which it cannot"
        return self.supports(spec)


@dataclass(frozen=True)
class Choice:
    """One line of the kernel table."""

    label: str
    kernel: str
    declined: tuple[tuple[str, str], ...]
    """(kernel, reason) of the better candidates."""
    pages: str = PLAIN_PAGES
    rounds: bool = False
    """It rounds activations to fewer bits."""
    waits: bool = False
    """It copies numbers from the device."""
    plain_pages: Callable[..., object] | None = None
    """Turns pages of its layout into plain ones."""
    keeps: tuple[str, ...] = ()
    """Storage types of experts that stay as they are."""


KernelTable = Mapping[str, list[str]]

KERNEL_TABLES: Table[KernelTable] = Table(
    "device with kernels",
    {
        "cpu": "banyan.ops.cpu:KERNELS",
        "cuda": "banyan.ops.cuda:KERNELS",
        "npu": "banyan.ascend.ops:KERNELS",
        "null": "banyan.ops.bind:NULL_KERNELS",
    },
    plugins="banyan.kernels",
)
"""Device -> op -> "module:attribute" of its candidates, best first."""

OpenToolkit = Callable[[int, Mapping[str, str]], Toolkit]
TOOLKITS: Table[OpenToolkit] = Table(
    "device toolkit",
    {
        "cpu": "banyan.ops.cpu:open_toolkit",
        "cuda": "banyan.ops.cuda:open_toolkit",
        "npu": "banyan.ascend.ops.toolkit:open_toolkit",
    },
    plugins="banyan.toolkits",
)
"""Opens a device's toolkit; arguments: (threads of a rank, wishes)."""

PROBES: Table[Callable[[Any], Peaks]] = Table(
    "device probe", {"cpu": "banyan.ops.cpu.library:measure_peaks"}, plugins="banyan.probes"
)
"""Measures a device's peaks with its toolkit."""


def open_toolkit(platform: str, threads: int, wishes: Mapping[str, str]) -> Toolkit:
    """Open a device's toolkit.

    Args:
        wishes: flag -> value, for the kernel flags that the user set.

    Raises:
        ConfigError: the device cannot honour a wish.
    """
    if platform in TOOLKITS:
        return TOOLKITS.load(platform)(threads, wishes)
    for flag, value in wishes.items():
        raise ConfigError(f"--{flag} {value} does not exist on {platform}", hint="leave it out")
    return NO_TOOLKIT


class BoundOps:
    """The ops of one rank, bound and frozen; satisfies `ops.api.Ops`."""

    __slots__ = (
        *(name for name in OP_NAMES if name not in PACKED_OPS),
        *(f"pack_{name}" for name in PACKED_OPS),
        "choices",
        "recorder",
        "cache_dtype",
        "_spec",
    )
    choices: tuple[Choice, ...]
    _spec: OpSpec

    def __init__(
        self, functions: Mapping[str, object], choices: tuple[Choice, ...], spec: OpSpec
    ) -> None:
        for name, function in functions.items():
            object.__setattr__(self, name, function)
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "cache_dtype", spec.cache_dtype)
        object.__setattr__(self, "recorder", spec.toolkit.recorder)
        object.__setattr__(self, "_spec", spec)

    def joins_index(self, shape: IndexShape) -> bool:
        uses_dp_attention = self._spec.toolkit.joins_index(shape)
        return uses_dp_attention and not self.is_reference("choose_positions")

    def open_prologue(self, shape: PrologueShape) -> LatentPrologue | None:
        if self.is_reference("write_latent"):
            return None
        return self._spec.toolkit.open_prologue(shape, self._spec.dtype, self._spec.device)

    def is_reference(self, op: str) -> bool:
        """Whether the op runs the plain reference."""
        return any((c.label, c.kernel) == (op, REFERENCE) for c in self.choices)

    def waits(self, op: str) -> bool:
        """Whether the op's kernel copies numbers from the device, so it cannot be captured."""
        return any(c.waits for c in self.choices if c.label == op)

    def plain_pages(self, op: str) -> Callable[..., object] | None:
        """What turns pages of the op's kernel into plain ones; None = they are plain."""
        return next((c.plain_pages for c in self.choices if c.label == op), None)

    @property
    def rounded_types(self) -> list[str]:
        """Storage types of checkpoints that require activations of 8 bits, where products round
        them so."""
        served = {c.label for c in self.choices if c.rounds}
        return [name for name in (STATIC, E4M3_DYNAMIC) if f"linear[{name}]" in served]

    @property
    def kept_types(self) -> list[str]:
        """Storage types of projections that stay quantised."""
        served = {c.label for c in self.choices if c.kernel != REFERENCE}
        return [
            name
            for name, storage in STORAGE_TYPES.items()
            if not storage.is_float and f"linear[{name}]" in served
        ]

    @property
    def kept_floats(self) -> list[str]:
        """Storage types of floats of few bits that stay as they are: all of 8 bits, where the
        products of one type do, and others of the experts' kernel."""
        eight = (E4M3, E4M3_DYNAMIC) if E4M3 in self.kept_types else ()
        return [*eight, *(type for choice in self.choices for type in choice.keeps)]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} is bound: kernels are chosen once")


def bind(
    platform: str,
    device: torch.device,
    dtype: torch.dtype,
    features: frozenset[str],
    head_dim: int,
    forced: Mapping[str, str] | None = None,
    exact: bool = False,
    cache_dtype: torch.dtype | None = None,
    toolkit: Toolkit = NO_TOOLKIT,
    page_size: int = 16,
    exact_head: bool = False,
    torch_phase: str = "",
    sees_ahead: bool = False,
) -> Ops:
    """Choose the kernels of one rank.

    Args:
        platform: name of the kernel table (`Traits.name`).
        forced: op -> kernel name or "reference", overriding the order of the table.
        exact: no kernel may round activations.
        cache_dtype: dtype of the K/V pages; None = the toolkit's choice.
        toolkit: the device's toolkit (`open_toolkit`).
        page_size: tokens of a K/V page; a warning names sizes that would allow a better kernel.
        exact_head: the kernel of the projection to logits may not round activations.
        torch_phase: PREFILL or DECODE: torch attends for the rows of that phase; "" = none.
        sees_ahead: attention must take `ends`.

    Raises:
        ConfigError: a forced op or kernel does not exist, or declines.
    """
    forced = forced or {}
    for op in forced:
        if op not in OP_NAMES:
            raise ConfigError(f"no op is called {op!r}", hint=f"choose: {', '.join(OP_NAMES)}")
    table = KERNEL_TABLES.load(platform)
    cached = cache_dtype or toolkit.cache_dtype(dtype, exact)
    spec = OpSpec("", device, dtype, features, head_dim, "", exact, cached, page_size)
    spec = replace(spec, toolkit=toolkit, sees_ahead=sees_ahead)
    if any(op in forced for op in ON_PAGES):  # a forced op decides the page layout for the others
        forced = dict.fromkeys(ON_PAGES, REFERENCE) | dict(forced)
    functions: dict[str, object] = {}
    choices: list[Choice] = []
    for op in OP_NAMES:
        packers: dict[str, Callable[..., object]] = {}
        head_packers: dict[str, Callable[..., object]] = {}
        for weight_type in STORAGE_TYPES if op in TYPED_OPS else ("",):
            asked = replace(spec, op=op, weight_type=weight_type)
            choice, run = _choose(platform, table.get(op, []), asked, forced.get(op, ""))
            choices.append(choice)
            packers[weight_type] = head_packers[weight_type] = run
            if exact_head and op == "linear":
                asked = replace(asked, exact=True, is_head=True)
                choice, run = _choose(platform, table.get(op, []), asked, forced.get(op, ""))
                choices.append(choice)
                head_packers[weight_type] = run
        if op in TYPED_OPS:
            functions[f"pack_{op}"] = partial(_pack, packers, head_packers, dtype, device)
        elif op in PACKED_OPS:
            functions[f"pack_{op}"] = partial(_pack_whole, packers[""], dtype, device)
        else:
            functions[op] = packers[""]
        if op == "norm_rotary" and choices[-1].kernel == REFERENCE and op not in forced:
            functions[op] = partial(
                _norm_rotary, cast(Any, functions["rms_norm"]), cast(Any, functions["rotary"])
            )
            choices[-1] = replace(choices[-1], kernel="rms_norm, rotary")
        if op == "paged_attention" and torch_phase:
            functions[op] = _by_phase(packers[""], torch_phase, choices)
    _check_layouts(choices)
    _warn_of_slow_pages(platform, table, spec, forced)
    return cast(Ops, BoundOps(functions, tuple(choices), spec))


def _norm_rotary(
    rms_norm: Callable[..., Tensor],
    rotary: Callable[..., object],
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    *angles: Tensor,
) -> object:
    """By the kernels of its two parts, for devices without one of its own."""
    return rotary(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), *angles)


def _by_phase(
    own: Callable[..., object], phase: str, choices: list[Choice]
) -> Callable[..., object]:
    """Attention in torch for one phase. Replaces the last choice by one that names both kernels,
    and that waits."""
    from banyan.ops.torch_attention import by_phase

    mine = choices[-1]
    other = PREFILL if phase == DECODE else DECODE
    names = {other: mine.kernel, phase: "torch_attention"}
    kernel = " ".join(f"{each}={name}" for each, name in names.items())
    choices[-1] = replace(mine, kernel=kernel, waits=True)
    return by_phase(cast(Any, own), phase, cast(Any, mine.plain_pages))


def _check_layouts(choices: list[Choice]) -> None:
    """ConfigError unless the ops that share pages have the same layout."""
    layouts = {choice.label: choice.pages for choice in choices if choice.label in ON_PAGES}
    if len(set(layouts.values())) > 1:
        raise ConfigError(
            "kernels that lay out pages differently cannot serve one cache: "
            + ", ".join(f"{op}: {layout}" for op, layout in layouts.items()),
            hint=f"force both of {', '.join(ON_PAGES)}, or none",
        )


def _warn_of_slow_pages(
    platform: str, table: KernelTable, spec: OpSpec, forced: Mapping[str, str]
) -> None:
    """Warn if another page size would allow a faster kernel, and name the sizes."""
    op = "paged_attention"
    if op in forced:
        return

    def kernel(page_size: int) -> str:
        asked = replace(spec, op=op, page_size=page_size)
        return _choose(platform, table.get(op, []), asked, "")[0].kernel

    mine = kernel(spec.page_size)
    by_size = {size: kernel(size) for size in (1 << n for n in range(11))}
    best = min(by_size.values(), key=[*map(_short, table.get(op, [])), REFERENCE].index)
    if mine != best:
        fast = ", ".join(str(size) for size, found in by_size.items() if found == best)
        log.warning(
            "--page-size %d is slow: %s attends in place of %s; these sizes are fast: %s",
            spec.page_size,
            mine,
            best,
            fast,
        )


def kernel_table(choices: tuple[Choice, ...]) -> str:
    """The choices as text: each kernel (or module, if kernels have the names of their ops), its
    ops, and why better kernels declined them.
    """
    lines: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        why = "; ".join(f"{kernel}: {reason}" for kernel, reason in choice.declined)
        kernel = choice.kernel.removesuffix(f":{choice.label}")
        lines.setdefault((kernel, why), []).append(choice.label)
    return "\n".join(
        f"{kernel:<18} {' '.join(labels)}{f' ({why})' if why else ''}"
        for (kernel, why), labels in lines.items()
    )


def _choose(
    platform: str, candidates: list[str], spec: OpSpec, forced: str
) -> tuple[Choice, Callable[..., object]]:
    names = {_short(path): path for path in candidates}
    if forced and forced not in (*names, *candidates, REFERENCE):
        raise ConfigError(
            f"op {spec.op} has no kernel {forced!r} on {platform}",
            hint=f"choose: {', '.join((*names, REFERENCE))}",
        )
    declined: list[tuple[str, str]] = []
    for name in [_short(forced)] if forced else names:
        if name == REFERENCE:
            break
        module, _, attribute = names[name].partition(":")
        kernel: Kernel = getattr(import_module(module), attribute)
        reason = kernel.declines(spec)
        if reason is None:
            choice = Choice(
                spec.label,
                name,
                tuple(declined),
                kernel.pages,
                kernel.rounds_activations,
                kernel.waits,
                kernel.plain_pages,
                kernel.keeps,
            )
            return choice, kernel.function(spec.toolkit)
        declined.append((name, reason))
    if forced not in ("", REFERENCE) and not spec.weight_type:
        raise ConfigError(f"kernel {forced} cannot serve {spec.label}: {declined[0][1]}")
    run = getattr(reference, f"pack_{spec.op}" if spec.op in PACKED_OPS else spec.op)
    waits = spec.op in WAITING_REFERENCES
    return Choice(spec.label, REFERENCE, tuple(declined), waits=waits), run


def _short(path: str) -> str:
    """ "package.module:attribute" in short: "module:attribute"."""
    module, colon, attribute = path.rpartition(":")
    return module.rpartition(".")[2] + colon + attribute


def _pack(
    packers: Mapping[str, Callable[..., object]],
    head_packers: Mapping[str, Callable[..., object]],
    dtype: torch.dtype,
    device: torch.device,
    weight: StoredWeight,
    *more: object,
    **named: object,
) -> object:
    chosen = head_packers if named.get("is_head") else packers
    return chosen[weight.type](weight, dtype, device, *more, **named)


def _pack_whole(
    run: Callable[..., object],
    dtype: torch.dtype,
    device: torch.device,
    weights: object,
    *more: object,
) -> object:
    return run(weights, dtype, device, *more)


def _attention_of_null(q: Tensor, *_: object, **named: object) -> Tensor:
    """Only the shape is right."""
    return torch.empty_like(q)


NULL_ATTENTION = Kernel(run=_attention_of_null, supports=lambda spec: None, sees_ahead=True)
NULL_KERNELS = {"paged_attention": ["banyan.ops.bind:NULL_ATTENTION"]}
"""The null device: meta tensors run the reference, except attention, which reads numbers there."""
