"""`banyan lora inspect PATH`: show an adapter, and check whether it fits a model.

Reads the adapter, but no weights of the model.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from banyan.base.errors import ConfigError
from banyan.base.log import printable, start_logging
from banyan.bench.options import option, split_options
from banyan.config.cli import parse
from banyan.config.env import read_environment
from banyan.config.prepare import prepare
from banyan.hub.catalogue import megabytes
from banyan.lora.adapter_config import AdapterConfig
from banyan.lora.adapter_files import read_adapter

NOT_SERVED = 1

_ABOUT = """Says what the adapter at PATH changes (its projections, ranks, alphas, types, bytes),
and with --model-path BASE whether it fits that model; BASE may be anything that banyan serve
takes. Nothing is served, and no weights of BASE are read. Ends with 0 when it can be served, with 1
and the reason when it cannot."""


@dataclass(frozen=True)
class InspectOptions:
    """What is asked of `banyan lora inspect`."""

    model_path: str = option("", "the model that it should fit")


def lora(argv: Sequence[str]) -> int:
    if not argv:
        raise ConfigError("banyan lora needs a command", hint="write: banyan lora inspect PATH")
    if argv[0] in ("-h", "--help"):
        return _inspect(["--help"])
    if argv[0] != "inspect":
        raise ConfigError(
            f"banyan lora has no {printable(argv[0], 60)!r}", hint="write: banyan lora inspect PATH"
        )
    return _inspect(argv[1:])


def _inspect(argv: Sequence[str]) -> int:
    options, rest = split_options(InspectOptions, argv, "banyan lora inspect PATH", _ABOUT)
    if len(rest) != 1 or rest[0].startswith("-"):
        raise ConfigError(
            f"banyan lora inspect takes one path, and there are {len(rest)} words",
            hint="see banyan lora inspect --help",
        )
    start_logging("lora", "warning")
    (path,) = rest
    if not os.path.exists(path):
        raise ConfigError(f"there is nothing at {printable(path, 200)!r}")
    try:
        adapter_config = read_adapter(path)
        for line in _lines(adapter_config):
            print(line)
        _check_numbers(adapter_config)
        verdict = _fit(adapter_config, options.model_path)
    except ConfigError as error:
        print(f"CANNOT BE SERVED: {error}")
        return NOT_SERVED
    print(verdict)
    return 0


def _lines(adapter_config: AdapterConfig) -> Iterator[str]:
    modules = adapter_config.modules.values()
    form = "GGUF" if adapter_config.format == "gguf" else "PEFT"
    types = ", ".join([form, *sorted({found.type for found in modules})])
    size = megabytes(adapter_config.size_bytes)
    yield f"{'adapter':<10} {printable(adapter_config.path, 200)}: {types}, {size}"
    yield f"{'base':<10} {printable(adapter_config.base, 100) or 'it does not say'}"
    targets = ", ".join(printable(name, 60) for name in adapter_config.adapted)
    yield f"{'targets':<10} {targets or 'none'}"
    for name, whole in adapter_config.saved.items():
        what = (
            "the base's own, in addition to its matrices"
            if whole.is_copy
            else "in the base's place"
        )
        yield f"{'whole':<10} {printable(name, 60)} {list(whole.shape)}, {what}"
    for name, tokens in adapter_config.tokens.items():
        first = ", ".join(map(str, tokens.ids[:5])) + (" …" if len(tokens.ids) > 5 else "")
        count = len(tokens.ids)
        yield f"{'tokens':<10} {printable(name, 60)}: {count} ({first}), in the base's place"
    if adapter_config.kinds:
        kinds = ", ".join(sorted(adapter_config.kinds))
        yield f"{'needs room':<10} for {kinds}, which the start makes"
    ranks = Counter(found.rank for found in modules)
    counts = [f"{rank} ({count})" for rank, count in sorted(ranks.items())]
    yield f"{'ranks':<10} {', '.join(counts)} of {len(adapter_config.modules)} projections"
    head = f"{'PROJECTION':<28} {'COUNT':>5} {'RANK':>5} {'ALPHA':>8} {'SCALE':>8}"
    yield f"\n{head} {'INPUTS':>7} {'OUTPUTS':>7} TYPE"
    kinds = Counter(
        (name.rpartition(".")[2], m.rank, m.alpha, m.scale, m.inputs, m.outputs, m.type)
        for name, m in adapter_config.modules.items()
    )
    for (name, rank, alpha, scale, inputs, outputs, kind), count in sorted(kinds.items()):
        yield (
            f"{printable(name, 28):<28} {count:>5} {rank:>5} {alpha:>8g} {scale:>8.4g} "
            f"{inputs:>7} {outputs:>7} {kind}"
        )
    yield ""


def _check_numbers(adapter_config: AdapterConfig) -> None:
    from banyan.lora.load import check_numbers

    check_numbers(adapter_config)


def _fit(adapter_config: AdapterConfig, source: str) -> str:
    """The verdict line for a model.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    flag = f"--lora-paths NAME={printable(adapter_config.path, 200)}"
    if not source:
        return f"CAN BE SERVED with a model that it fits; check with --model-path. {flag}"
    import torch

    from banyan.lora.load import base_without_weights, check_fit
    from banyan.ops.bind import bind

    environment = read_environment()
    _, model = prepare(parse(["--model-path", source], environment), environment)
    ops = bind("cpu", torch.device("cpu"), torch.float32, frozenset(), model.head_dim)
    check_fit(adapter_config, base_without_weights(model, ops))
    return f"FITS {printable(source, 200)}: banyan serve {printable(source, 200)} {flag}"
