"""`banyan quantize IN OUT --type T`: a model of float weights as one of few bits, on the disk."""

import json
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

from banyan.base.errors import BanyanError, ConfigError, ModelError
from banyan.base.log import printable, start_logging
from banyan.bench.options import option, split_options
from banyan.cli.bench import progress_bar
from banyan.config.env import forget_secrets, read_environment
from banyan.config.schema import LoadConfig
from banyan.hub.catalogue import megabytes
from banyan.hub.sources import fetch
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.model_config import ModelConfig

if TYPE_CHECKING:
    from banyan.bench.fidelity import Divergence, Scores
    from banyan.llm import Engine
    from banyan.models.quantize.layouts import TargetLayout
    from banyan.models.quantize.plan import GGUFMetadata, QuantizePlan
    from banyan.models.quantize.source import SourceCheckpoint
    from banyan.models.quantize.writer import OtherFiles

HUB_TYPES = ("int8", "w8a16", "w4a16", "fp8", "fp8-block")
FLOAT_TYPES = ("bf16", "f32")
GGUF_TYPES = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "f16")
_MOST_GROUP = 1 << 16
_PROMPT_LEN = 256
"""Tokens per prompt."""
_TOP = 256
"""Most likely tokens per position, the engine's maximum."""
_CACHE_TOKENS = 4096
_SMALL_GROWTH, _LARGE_GROWTH = 0.02, 0.1
"""Growth of the perplexity up to which a loss is small, or visible; above it is large."""
_SAME_MOSTLY, _SAME_OFTEN = 0.95, 0.85
"""Shares of positions with the same likeliest token, for the same two."""
_DRAWN = 400
"""Length of the synthetic prompt for a model without a tokenizer."""

_TYPES = (*HUB_TYPES, *FLOAT_TYPES, *GGUF_TYPES)

_ABOUT = """Rounds the projections of IN, which may be anything that banyan serve takes, and writes
the result to OUT: a folder in compressed-tensors' form (int8, w8a16, w4a16, fp8, fp8-block) or a
.gguf file (q8_0 to f16), both from either form; of a GGUF file also a folder of floats (bf16,
f32). Embeddings, heads, norms and routers stay as they are. One tensor is in memory at a time; a
run that was cut off goes on where it was, with the same command. At the end both are served, and
compared on a fixed text."""


@dataclass(frozen=True)
class QuantizeOptions:
    """What is asked of `banyan quantize`."""

    type: str = option("", f"one of: {', '.join(_TYPES)}")
    group_size: int = option(128, "w4a16: inputs that share a scale; 64 or 32 where it divides not")
    ignore: tuple[str, ...] = option((), "modules that stay as they are: names, or re:PATTERN")
    max_shard_gib: float = option(4.0, "size of a file of the folder; what a cut loses at most")
    allow_requantize: bool = option(False, "also take a GGUF file that is rounded already")
    no_report: bool = option(False, "do not serve both and compare them at the end")


def quantize(argv: Sequence[str]) -> int:
    options, rest = split_options(QuantizeOptions, argv, "banyan quantize IN OUT", _ABOUT)
    if len(rest) != 2 or rest[0].startswith("-") or rest[1].startswith("-"):
        raise ConfigError(
            f"banyan quantize takes IN and OUT, and there are {len(rest)} words",
            hint="see banyan quantize --help",
        )
    _check(options)
    environment = read_environment()
    forget_secrets()
    start_logging("quantize", "warning")
    source = fetch(LoadConfig(source=rest[0]), environment)
    model_config = read_model_config(source)
    target = Path(os.path.abspath(os.path.expanduser(rest[1])))
    _check_the_source(model_config, options)
    _check_the_target(model_config, target, options)
    try:
        for line in _made(model_config, target, options):
            print(line)
    except KeyboardInterrupt:
        print("banyan: stopped; the same command goes on where it was", file=sys.stderr)
        return 130
    if not options.no_report:
        print(_reported(model_config, target))
    print(f"banyan serve {printable(str(target), 200)}")
    return 0


def _check(options: QuantizeOptions) -> None:
    if options.type not in _TYPES:
        named = printable(options.type, 60)
        asked = f"unknown --type {named!r}" if named else "--type is missing"
        raise ConfigError(asked, hint=f"choose one of: {', '.join(_TYPES)}")
    if not 32 <= options.group_size <= _MOST_GROUP or options.group_size % 32:
        raise ConfigError(
            f"--group-size {options.group_size}",
            hint=f"choose a multiple of 32 up to {_MOST_GROUP:,}",
        )
    if not 0 < options.max_shard_gib <= 1024:
        raise ConfigError(f"--max-shard-gib {options.max_shard_gib:g}", hint="choose 0.001 to 1024")


def _check_the_source(model_config: ModelConfig, options: QuantizeOptions) -> None:
    where = printable(model_config.path, 200)
    if model_config.quant is not None:
        raise ConfigError(
            f"the weights of {where!r} are {model_config.quant.method} already",
            hint="name the float checkpoint that it was made from",
        )
    if options.type in FLOAT_TYPES:
        if model_config.format != "gguf":
            raise ConfigError(
                f"--type {options.type} makes a folder of a GGUF file, and {where!r} is one of "
                f"{model_config.dtype}",
                hint=f"choose one of: {', '.join((*HUB_TYPES, *GGUF_TYPES))}",
            )
        return
    if not model_config.stores_floats and not (
        options.allow_requantize and model_config.format == "gguf"
    ):
        raise ConfigError(
            f"the weights of {where!r} are {model_config.dtype} already",
            hint="name the float file that it was made from; --allow-requantize rounds them again",
        )


def _check_the_target(model_config: ModelConfig, target: Path, options: QuantizeOptions) -> None:
    where, source = printable(str(target), 200), Path(model_config.path).resolve()
    if target.resolve() == source or source in target.resolve().parents:
        raise ConfigError(f"OUT is IN, or lies in it: {where!r}", hint="name another place")
    if options.type in GGUF_TYPES:
        if target.suffix != ".gguf":
            raise ConfigError(f"OUT is {where!r}", hint="name a file that ends with .gguf")
        if target.exists():
            raise ConfigError(f"{where!r} is there already", hint="delete it, or name another file")
        return
    if target.is_file():
        raise ConfigError(f"{where!r} is a file", hint="name a folder")
    is_cut_off = _record_of(target, options).exists()
    if target.is_dir() and any(target.iterdir()) and not is_cut_off:
        raise ConfigError(f"{where!r} is not empty", hint="delete it, or name another folder")


def _record_of(target: Path, options: QuantizeOptions) -> Path:
    if options.type in GGUF_TYPES:
        return target.with_name(f"{target.name}.progress")
    return target / ".progress"


def _made(model_config: ModelConfig, target: Path, options: QuantizeOptions) -> Iterator[str]:
    """Write it; says what it has become."""
    import banyan
    from banyan.models.quantize.layouts import layout_of
    from banyan.models.quantize.plan import make_plan
    from banyan.models.quantize.source import SourceCheckpoint
    from banyan.models.quantize.writer import Record, on_disk, write_files, write_other_files

    layout = layout_of(options.type, options.group_size)
    is_folder = options.type not in GGUF_TYPES
    folder = target if is_folder else target.parent
    with closing(SourceCheckpoint(model_config)) as source:
        most = max(1, int(options.max_shard_gib * (1 << 30)))
        words = None if is_folder or model_config.format == "gguf" else _words(model_config)
        other_files = _other_files(model_config, source, layout) if is_folder else None
        plan = make_plan(source, layout, options.ignore, most, target.name, words)
        if not plan.kinds:
            raise ConfigError(
                f"no weight of {printable(model_config.path, 200)!r} can be rounded to "
                f"{options.type}",
                hint="see --ignore, and docs/quantization.md",
            )
        folder.mkdir(parents=True, exist_ok=True)
        if words is not None:
            _check_the_header(model_config, plan, words, target)
        identity = {
            "version": banyan.__version__,
            "source": [list(file) for file in source.files_state()],
            "type": options.type,
            "group_size": options.group_size,
            "ignore": list(options.ignore),
            "max_shard_gib": options.max_shard_gib,
        }
        with on_disk(target):
            record = Record(_record_of(target, options), identity)
            written = write_files(plan, source, folder, record, progress_bar("tensors"))
            if other_files is not None:
                write_other_files(plan, layout, other_files, target)
            record.done()
    rounded = sum(len(names) for names in plan.kinds.values())
    before = sum(tensor.size_bytes for tensor in source.tensors.values())
    if written < plan.size_bytes:
        yield f"went on    {megabytes(plan.size_bytes - written)} were whole already"
    yield f"rounded    {rounded} of {plan.num_units} tensors to {options.type}"
    for why, count in plan.kept.items():
        yield f"kept       {count} projections {why}"
    sizes = f"{megabytes(before)} -> {megabytes(plan.size_bytes)}"
    if is_folder and model_config.num_mtp_layers and model_config.format == "gguf":
        yield f"left out   {model_config.num_mtp_layers} layers that draft"
    yield f"size       {sizes} in {len(plan.files)} files"


def _other_files(
    model_config: ModelConfig, source: "SourceCheckpoint", layout: "TargetLayout"
) -> "OtherFiles":
    """The files of a model folder besides weights: copied, or built from a GGUF file's metadata.

    Raises:
        ModelError: config.json cannot say what the model is.
    """
    from banyan.model_config.export import differences, hub_keys
    from banyan.models.quantize.plan import float_type
    from banyan.models.quantize.writer import OtherFiles, other_files_of
    from banyan.tokenizer.write import folder_words

    if model_config.format != "gguf":
        return other_files_of(Path(model_config.path))
    kinds = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    config = hub_keys(model_config, kinds[float_type(source, layout)])
    with TemporaryDirectory() as tried:
        Path(tried, "config.json").write_text(json.dumps(config))
        try:
            found = differences(model_config, read_model_config(tried, "dummy"))
        except ModelError as error:
            found = [error.text.replace(tried, "it")]
    if found:
        raise _without_facts("config.json", model_config, found, GGUF_TYPES)
    words = folder_words(model_config.path, model_config.context_length, model_config.eos_ids)
    if not words:
        print(
            f"banyan: {printable(model_config.path, 200)} has no vocabulary, and OUT will have "
            "none",
            file=sys.stderr,
        )
    return OtherFiles(words, config)


def _without_facts(
    form: str, model_config: ModelConfig, found: Sequence[str], types: Sequence[str]
) -> ModelError:
    return ModelError(
        f"{form} does not hold all facts of {printable(model_config.path, 200)!r}: "
        f"{'; '.join(found[:3])}",
        hint=f"choose one of: {', '.join(types)}",
    )


def _words(model_config: ModelConfig) -> "GGUFMetadata":
    """What a GGUF file says that is made from this folder."""
    from banyan.model_config.export import gguf_keys, rope_divisors
    from banyan.models.quantize.plan import GGUFMetadata
    from banyan.tokenizer.write import gguf_words

    keys = gguf_keys(model_config)
    words = gguf_words(model_config.path, model_config.vocab_size, keys)
    if not words:
        print(
            f"banyan: {printable(model_config.path, 200)} has no tokenizer.json, and OUT will "
            "have no "
            "vocabulary",
            file=sys.stderr,
        )
    divisors = rope_divisors(model_config)
    return GGUFMetadata(keys | words, {"rope_freqs.weight": divisors} if divisors else {})


def _check_the_header(
    model_config: ModelConfig, plan: "QuantizePlan", words: "GGUFMetadata", target: Path
) -> None:
    """Read the file back before a number is rounded, as it will be but for its weights.

    Raises:
        ModelError: the form cannot say what the model is.
    """
    from banyan.model_config.export import differences

    first, size = plan.files[0].pieces[0], plan.files[0].size_bytes
    tried = target.with_name(f"{target.stem}.header.gguf")
    try:
        with tried.open("wb") as file:
            file.write(first.head)
            for offset, numbers in zip(first.offsets, words.constants.values(), strict=False):
                file.seek(offset)
                file.write(struct.pack(f"<{len(numbers)}f", *numbers))
            file.truncate(size)
        found = differences(model_config, read_model_config(str(tried)))
    except ModelError as error:
        found = [error.text.replace(str(tried), "it")]
    finally:
        tried.unlink(missing_ok=True)
    if found:
        raise _without_facts("a GGUF file", model_config, found, HUB_TYPES)


def _reported(model_config: ModelConfig, target: Path) -> str:
    if model_config.is_encoder or model_config.pooling is not None:
        return "fidelity   not compared: the model gives vectors, no tokens"
    try:
        found = _fidelity(model_config.path, str(target), model_config)
    except BanyanError as error:
        print(f"banyan: the result is written; it could not be compared: {error}", file=sys.stderr)
        return "fidelity   not compared"
    return (
        f"fidelity   {found.num_tokens} tokens: KL {found.mean:.4f} in the mean, "
        f"{found.worst:.3f} at worst; the same likeliest token at {found.same_top:.1%}; "
        f"perplexity {found.reference_perplexity:.2f} -> {found.perplexity:.2f}\n"
        f"verdict    {verdict_on(found)}"
    )


def verdict_on(found: "Divergence") -> str:
    """What the figures mean, and what to do."""
    growth = found.perplexity / found.reference_perplexity - 1
    if growth <= _SMALL_GROWTH and found.same_top >= _SAME_MOSTLY:
        return "close to the source"
    if growth <= _LARGE_GROWTH and found.same_top >= _SAME_OFTEN:
        return "a visible loss: compare answers with banyan bench eval --against"
    return (
        "a large loss: take a type of more bits (w8a16, int8, q6_k, q8_0), a smaller --group-size, "
        "or a source that is not quantised yet"
    )


def _fidelity(source: str, result: str, model_config: ModelConfig) -> "Divergence":
    """Serve the source and the result and compare them on the same tokens.

    Raises:
        BanyanError: one of them cannot be served.
    """
    from banyan.bench.fidelity import divergence

    most = min(_PROMPT_LEN, model_config.context_length - 2)
    reference, pieces = _scored(source, most, model_config, None)
    other, _ = _scored(result, most, model_config, pieces)
    return divergence(reference, other)


def _scored(
    path: str, most: int, model_config: ModelConfig, given: Sequence[list[int]] | None
) -> "tuple[Scores, Sequence[list[int]]]":
    from banyan.bench.fidelity import Likeliest, Scores
    from banyan.llm import Engine

    words = ["--model-path", path, "--log-level", "error", "--skip-server-warmup"]
    words += ["--max-total-tokens", str(_CACHE_TOKENS)]
    with Engine.from_words(words) as engine:
        pieces = given or list(_pieces(engine, most, model_config.vocab_size))
        logprobs, likeliest = list[float](), list[Likeliest]()
        for piece in pieces:
            answer = engine.generate(
                input_ids=piece,
                sampling_params={"temperature": 0, "max_new_tokens": 1},
                return_logprob=True,
                logprob_start_len=0,
                top_logprobs_num=min(_TOP, model_config.vocab_size),
            )
            facts = cast(dict[str, list[object]], cast(dict[str, object], answer)["meta_info"])
            # The first token has no log-probability.
            tokens = cast(list[tuple[float, int, str]], facts["input_token_logprobs"][1:])
            tops = cast(list[list[tuple[float, int, str]]], facts["input_top_logprobs"][1:])
            logprobs += [logprob for logprob, _, _ in tokens]
            likeliest += [{token: logprob for logprob, token, _ in top} for top in tops]
    return Scores(logprobs, likeliest), pieces


def _pieces(engine: "Engine", most: int, vocab_size: int) -> Iterator[list[int]]:
    from banyan.bench.fidelity import TEXT

    if engine.tokenizer is not None:
        tokens = list(engine.tokenizer.encode(TEXT))
    else:
        tokens = [(7919 * at * at + 104729 * at) % vocab_size for at in range(_DRAWN)]
    for first in range(0, len(tokens), most):
        piece = tokens[first : first + most]
        if len(piece) > 1:
            yield piece
