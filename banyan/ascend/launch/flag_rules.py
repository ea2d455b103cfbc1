"""Rules 1 to 3: backends, pages, and how weights are quantised; and the documents' own table."""

from collections.abc import Iterator

from banyan.ascend.launch.facts import Launch
from banyan.ascend.launch.findings import Breach, breach
from banyan.ascend.launch.support import REFUSED, device_outcomes

_ATTENTION = ("auto", "ascend", "torch_native")
_PAGE_STEP, _LARGEST_PAGE = 128, 512
_QUANTIZATIONS = (
    *("modelslim", "w8a8_int8", "gptq", "awq", "compressed-tensors", "gguf", "unquant"),
)
_CHOICES = (
    ("1a", "attention-backend", _ATTENTION),
    ("1a", "prefill-attention-backend", _ATTENTION),
    ("1a", "decode-attention-backend", _ATTENTION),
    ("1b", "sampling-backend", ("pytorch", "ascend")),
    ("1c", "grammar-backend", ("xgrammar", "none")),
    ("1d", "kv-cache-dtype", ("auto", "bf16", "bfloat16")),
)


def backends(launch: Launch) -> Iterator[Breach]:
    for rule, flag, allowed in _CHOICES:
        value = launch.text(flag)
        if value and value not in allowed:
            yield breach(rule, flag=flag, value=value)


def pages(launch: Launch) -> Iterator[Breach]:
    size = launch.number("page-size")
    if not size:
        return
    if size % _PAGE_STEP or not _PAGE_STEP <= size <= _LARGEST_PAGE:
        yield breach("2a", value=size)
    elif size != _PAGE_STEP:
        if launch.is_set("SGLANG_USE_FIA_NZ"):
            yield breach("2b", value=size, why="a cache in the fractal format")
        elif launch.model is not None and launch.model.is_latent:
            yield breach("2b", value=size, why=f"the latent attention of {launch.model.name}")


def quantization(launch: Launch) -> Iterator[Breach]:
    value = launch.text("quantization")
    is_modelslim = None if launch.model is None else launch.model.is_modelslim
    if value and value not in _QUANTIZATIONS:
        yield breach("3c", value=value)
    elif value == "modelslim" and is_modelslim is False:
        yield breach("3a")
    elif value not in ("", "modelslim", "w8a8_int8") and is_modelslim:
        yield breach("3b", value=value)


def support(launch: Launch) -> Iterator[Breach]:
    """What the documents' table says of each flag that was given."""
    outcomes = device_outcomes(launch.soc.name)
    for flag, value in launch.arguments.items():
        outcome = outcomes.get(flag)
        if outcome is not None and outcome.is_lowered and value is not False:
            rule = "flag-a" if outcome.verdict == REFUSED else "flag-b"
            yield breach(rule, flag=flag, column=outcome.column, soc=launch.soc.name)


FLAG_RULES = (backends, pages, quantization, support)
