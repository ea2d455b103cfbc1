"""Reads LoRA adapters in PEFT's format: a folder with `adapter_config.json` and safetensors. Reads
headers only, and refuses unsupported features by name."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from banyan.base.errors import ConfigError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import printable
from banyan.base.os import open_regular
from banyan.formats.safetensors import SafetensorsFile
from banyan.lora.adapter_config import (
    CONFIG,
    EMBEDDING,
    HEAD,
    MAX_RANK,
    WEIGHTS,
    AdapterConfig,
    LowRank,
    ReplacedWeight,
    TokenRows,
    check_types,
    stacked,
)
from banyan.model_config.checkpoint_fields import CheckpointFields, read_json

_MAX_PATTERNS = 4096
_PICKLED = ("adapter_model.bin", "adapter_model.pt")
_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(.+)\.lora_(?:embedding_)?(A|B)(?:\.default)?(?:\.weight)?")
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.default)?(?:\.weight)?")
_WHOLE = re.compile(r"(.+?)(\.base_layer)?\.weight")
_BIAS = re.compile(r"(.+?)(?:\.base_layer)?\.bias")
_CONVERSION = (
    "it is never opened, as a pickle may run anything: where you trust it, run python -c "
    '"import torch; from safetensors.torch import save_file; save_file({k: v.contiguous() for k, '
    "v in torch.load('adapter_model.bin').items()}, 'adapter_model.safetensors')\" in that folder"
)
_ABSENT_FEATURES = {
    "use_qalora": "QA-LoRA pools the inputs of its matrices",
    "lora_bias": "its matrices have biases",
    "fan_in_fan_out": "its matrices are transposed",
    "layer_replication": "it adds layers to the base",
    "alora_invocation_tokens": "it applies only after some token of the prompt (aLoRA)",
    "megatron_config": "it belongs to Megatron's layers",
    "arrow_config": "its parts are chosen for each token",
    "use_bdlora": "its matrices are made of blocks",
    "monteclora_config": "its matrices are drawn at random",
}
"""Configuration key of an unsupported feature -> reason for the error message."""
_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of `init_lora_weights` values that also change the base model's weights."""


def read_peft(path: str) -> AdapterConfig:
    """Read the configuration of the adapter in a folder.

    Raises:
        ConfigError, ModelError: the adapter cannot be served.
    """
    folder = printable(path, 200)
    _check_files(path, folder)
    raw = read_json(os.path.join(path, CONFIG), is_needed=True)
    facts = CheckpointFields(raw, os.path.join(path, CONFIG))
    _check_kind(facts, raw, folder)
    with SafetensorsFile.open(os.path.join(path, WEIGHTS)) as file:
        modules, saved, tokens = _modules(file, _Scales(facts), folder, facts)
        tokens = token_rows(file, tokens, raw, folder)
        size = file.size_bytes
    base = facts.text("base_model_name_or_path", "")
    brought = (_claimed(raw), saved, _stacked(raw), tokens, highest_token(path))
    adapter_config = AdapterConfig(path, base, modules, size, "safetensors", *brought)
    if raw.get("ensure_weight_tying") and adapter_config.kinds & {EMBEDDING, HEAD}:
        raise ConfigError(
            f"adapter {folder!r}: ensure_weight_tying is not available here: what it brings for "
            f"one of {EMBEDDING} and {HEAD} counts for the other too",
            hint="merge it into the weights",
        )
    return adapter_config


def _check_files(path: str, folder: str) -> None:
    there = set(os.listdir(path))
    if WEIGHTS in there and CONFIG in there:
        return
    if pickled := next((name for name in _PICKLED if name in there), None):
        raise ConfigError(f"adapter {folder!r} has a pickle, {pickled}: {_CONVERSION}")
    missing = CONFIG if CONFIG not in there else WEIGHTS
    if missing == CONFIG and "config.json" in there:
        raise ConfigError(
            f"{folder!r} holds a whole model, no adapter: {CONFIG} is missing",
            hint="name it by --model-path",
        )
    raise ConfigError(
        f"adapter {folder!r} lacks {missing}",
        hint="name a folder in the form of PEFT's save_pretrained",
    )


def _check_kind(facts: CheckpointFields, raw: Mapping[str, object], folder: str) -> None:
    kind = facts.text("peft_type", "LORA")
    if kind != "LORA":
        raise ConfigError(
            f"adapter {folder!r} is of type {printable(kind, 40)}; only LORA is served",
            hint="merge it into the weights",
        )
    for key, what in _ABSENT_FEATURES.items():
        if raw.get(key):
            raise ConfigError(
                f"adapter {folder!r}: {key} is not available here: {what}",
                hint="merge it into the weights",
            )
    bias = facts.text("bias", "none")
    if bias != "none":
        raise ConfigError(
            f"adapter {folder!r}: bias {printable(bias, 20)!r} is not available here: it changes "
            "the base's biases",
            hint="merge it into the weights",
        )
    start = str(raw.get("init_lora_weights"))
    if start.startswith(_OTHER_BASES):
        raise ConfigError(
            f"adapter {folder!r}: init_lora_weights {printable(start, 40)!r} changes the base's "
            "weights too, which others share",
            hint="save it with path_initial_model_for_weight_conversion, which makes a plain one",
        )


class _Scales:
    """Rank and scale of each projection, from `r`, `lora_alpha` and their patterns."""

    def __init__(self, facts: CheckpointFields) -> None:
        self._rank = facts.integer("r", 1, MAX_RANK, 8)
        self._alpha = facts.number("lora_alpha", -1e9, 1e9, 8)
        self._is_stabilised = facts.flag("use_rslora", default=False)
        self._ranks = _patterns(facts, "rank_pattern")
        self._alphas = _patterns(facts, "alpha_pattern")

    def of(self, module: str) -> tuple[int, float, float]:
        """Rank, alpha and the resulting scale."""
        rank = int(_matching(self._ranks, module, self._rank))
        alpha = _matching(self._alphas, module, self._alpha)
        return rank, alpha, alpha / (rank**0.5 if self._is_stabilised else rank)


def _patterns(facts: CheckpointFields, key: str) -> dict[str, float]:
    part = facts.part(key)
    raw = facts.any(key)
    if part is None or not is_object(raw):
        return {}
    if len(raw) > _MAX_PATTERNS:
        raise ConfigError(f"{key} has {len(raw):,} entries, limit {_MAX_PATTERNS:,}")
    low = 1 if key == "rank_pattern" else -1e9
    return {name: part.number(name, low, 1e9) for name in raw}


def _matching(patterns: Mapping[str, float], module: str, default: float) -> float:
    r"""The value of the first pattern that matches the end of the name, or all of it after "^".

    Only plain names, optionally after ".*\\.", are patterns here; PEFT writes that prefix for
    stacked experts. Regular expressions from strangers are not executed.
    """
    for pattern, value in patterns.items():
        plain = pattern.removeprefix("^").removeprefix(".*\\.").removesuffix("$")
        plain = plain.replace("\\.", ".")
        if not re.fullmatch(r"[\w.-]+", plain):
            raise ConfigError(
                f"rank_pattern and alpha_pattern: {printable(pattern, 80)!r} is a regular "
                "expression; only names of modules are read",
                hint="write the modules out",
            )
        is_whole = pattern[:1] == "^" and not pattern.startswith("^.*")
        ends = module == plain or (not is_whole and module.endswith("." + plain))
        if ends:
            return value
    return default


def _modules(
    file: SafetensorsFile, scales: _Scales, folder: str, facts: CheckpointFields
) -> tuple[dict[str, LowRank], dict[str, ReplacedWeight], dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    tokens: dict[str, str] = {}
    whole: dict[str, ReplacedWeight] = {}
    biases: dict[str, str] = {}
    unknown: list[str] = []
    for name in file.tensors:
        short = name.removeprefix(_PREFIX)
        if short == name:
            unknown.append(name)
        elif match := _MATRIX.fullmatch(short):
            found.setdefault(match.group(1), {})[match.group(2)] = name
        elif match := _MAGNITUDE.fullmatch(short):
            found.setdefault(match.group(1), {})["magnitude"] = name
        elif module := module_of_tokens(short):
            tokens[module] = name
        elif match := _WHOLE.fullmatch(short):
            is_copy = match.group(2) is not None
            whole[match.group(1)] = ReplacedWeight(name, file.tensors[name].shape, is_copy)
            check_types((file.tensors[name],), folder)
        elif match := _BIAS.fullmatch(short):
            biases[match.group(1)] = name
        else:
            unknown.append(name)
    unknown += [name for module, name in biases.items() if module not in whole]
    if unknown:
        raise ConfigError(
            f"adapter {folder!r}: {len(unknown)} tensors are no matrices of LoRA, magnitudes or "
            f"weights: {_first(unknown)}",
            hint="merge it into the weights",
        )
    if not found and not whole and not tokens:
        raise ConfigError(f"adapter {folder!r} has no tensors", hint="save it again")
    has_gains = facts.flag("use_dora", default=False)
    odd = [name for name, both in found.items() if ("magnitude" in both) != has_gains]
    if odd:
        raise ConfigError(
            f"adapter {folder!r}: use_dora is {str(has_gains).lower()}, and {len(odd)} projections "
            f"have {'no ' if has_gains else 'a '}magnitude: {_first(odd)}",
            hint="the configuration and the weights do not belong together",
        )
    for module, name in biases.items():
        whole[module] = _with_bias(file, whole[module], name, folder)
    found = stacks_by_parameter(file, found, _parameters(facts), folder)
    modules = {name: _low_rank(file, name, both, scales, folder) for name, both in found.items()}
    return modules, whole, tokens


def _with_bias(
    file: SafetensorsFile, whole: ReplacedWeight, name: str, folder: str
) -> ReplacedWeight:
    bias = file.tensors[name]
    check_types((bias,), folder)
    if bias.shape != whole.shape[:1]:
        raise ConfigError(
            f"adapter {folder!r}: {printable(name, 120)} has shape {list(bias.shape)}, and its "
            f"weight {list(whole.shape)}",
            hint="save or download it again",
        )
    return replace(whole, bias=name)


def _low_rank(
    file: SafetensorsFile, module: str, both: Mapping[str, str], scales: _Scales, folder: str
) -> LowRank:
    shown = printable(module, 100)
    if lacking := next((part for part in "AB" if part not in both), ""):
        raise ConfigError(
            f"adapter {folder!r} lacks lora_{lacking} of {shown}", hint="save or download it again"
        )
    down, up = file.tensors[both["A"]], file.tensors[both["B"]]
    check_types((down, up), folder)
    rank, alpha, scale = scales.of(module)
    if is_stack(module) or len(down.shape) == 3:
        return stacked(module, (down, up), (rank, alpha, scale), folder)
    shapes = (down.shape, up.shape)
    fits = len(down.shape) == len(up.shape) == 2 and down.shape[0] == up.shape[1] == rank
    if not fits or not down.shape[1] or not up.shape[0]:
        raise ConfigError(
            f"adapter {folder!r}: {shown} has matrices of {list(shapes[0])} and {list(shapes[1])}, "
            f"its configuration says rank {rank}",
            hint="the configuration and the weights do not belong together",
        )
    names = (both["A"], both["B"])
    magnitude = both.get("magnitude", "")
    if magnitude:
        check_types((file.tensors[magnitude],), folder)
        if file.tensors[magnitude].shape != up.shape[:1]:
            raise ConfigError(
                f"adapter {folder!r}: {shown} has {up.shape[0]} outputs and magnitudes of "
                f"{list(file.tensors[magnitude].shape)}",
                hint="save or download it again",
            )
    return LowRank(rank, alpha, down.shape[1], up.shape[0], scale, names, down.type, magnitude)


def _claimed(raw: Mapping[str, object]) -> tuple[str, ...]:
    """Names that `target_modules` adapts in every layer."""
    narrowed = ("layers_to_transform", "layers_pattern", "exclude_modules")
    if any(raw.get(key) not in (None, []) for key in narrowed):
        return ()
    claimed = raw.get("target_modules")
    if not is_list(claimed) or len(claimed) > _MAX_PATTERNS:
        return ()
    return tuple(name for name in claimed if isinstance(name, str) and name.isidentifier())


def _parameters(facts: CheckpointFields) -> tuple[str, ...]:
    """Names in `target_parameters`, or suffixes of them."""
    claimed = facts.any("target_parameters")
    if not is_list(claimed) or len(claimed) > _MAX_PATTERNS:
        return ()
    return tuple(name for name in claimed if isinstance(name, str))


def _stacked(raw: Mapping[str, object]) -> tuple[str, ...]:
    """Names in `target_parameters` that apply to every layer; a name with a number is for one
    layer."""
    narrowed = ("layers_to_transform", "layers_pattern", "exclude_modules")
    claimed = raw.get("target_parameters")
    is_restricted = any(raw.get(key) not in (None, []) for key in narrowed)
    if is_restricted or not is_list(claimed) or len(claimed) > _MAX_PATTERNS:
        return ()
    names = [name.split(".") for name in claimed if isinstance(name, str)]
    return tuple({name[-1] for name in names if not any(part.isdecimal() for part in name)})


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(printable(name, 120) for name in names[:3]) + more


_KEY = "trainable_token_indices"
_ROWS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta(?:\.default)?")
_ID = re.compile(r"[0-9]{1,18}")
_MAX_TOKENS = 1 << 16
_MAX_TOKENIZER_BYTES = 128 << 20
"""Limit for the size of a tokenizer.json."""


class _Added(msgspec.Struct):
    id: int


class _Tokenizer(msgspec.Struct):
    """The part of a tokenizer.json that is read here."""

    added_tokens: list[_Added] = []


def highest_token(path: str) -> int:
    """The highest id of a token that the tokenizer in a folder adds to its vocabulary
    (`added_tokens.json`, `tokenizer_config.json`, `tokenizer.json`); -1 if there is none.

    Raises:
        ConfigError, ModelError: a tokenizer file cannot be read.
    """
    plain = read_json(os.path.join(path, "added_tokens.json"), is_needed=False)
    config = read_json(os.path.join(path, "tokenizer_config.json"), is_needed=False)
    decoder = config.get("added_tokens_decoder")
    return max(
        _highest(plain.values()),
        _highest(int(name) for name in decoder if _ID.fullmatch(name))
        if is_object(decoder)
        else -1,
        _highest(token.id for token in _tokenizer(path).added_tokens),
    )


def _highest(ids: Iterable[object]) -> int:
    return max((token for token in ids if type(token) is int), default=-1)


def _tokenizer(path: str) -> _Tokenizer:
    name = os.path.join(path, "tokenizer.json")
    try:
        with open_regular(name) as file:
            raw = file.read(_MAX_TOKENIZER_BYTES + 1)
        if len(raw) > _MAX_TOKENIZER_BYTES:
            raise ConfigError(f"{printable(name)!r} is larger than {_MAX_TOKENIZER_BYTES:,} bytes")
        return msgspec.json.decode(raw, type=_Tokenizer)
    except FileNotFoundError:
        return _Tokenizer()
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {printable(name)!r}: {printable(str(error), 100)}",
            hint="save or download it again, or take the tokenizer out of the folder",
        ) from None


def module_of_tokens(name: str) -> str:
    """The module whose token rows a tensor holds; "" for other tensors."""
    match = _ROWS.fullmatch(name)
    return match.group(1) if match else ""


def token_rows(
    file: SafetensorsFile, names: Mapping[str, str], raw: Mapping[str, object], folder: str
) -> dict[str, TokenRows]:
    """Token rows by module, with the ids from the configuration.

    Args:
        names: module -> tensor name.

    Raises:
        ConfigError: the configuration and the tensors do not match.
    """
    asked = _asked(raw.get(_KEY), folder)
    found: dict[str, TokenRows] = {}
    for module, name in names.items():
        key = next((key for key in asked if module == key or module.endswith(f".{key}")), None)
        tensor = file.tensors[name]
        check_types((tensor,), folder)
        ids = asked.pop(key) if key is not None else ()
        if len(tensor.shape) != 2 or tensor.shape[0] != len(ids) or not ids:
            raise ConfigError(
                f"adapter {folder!r}: {printable(module, 100)} has rows of tokens of "
                f"{list(tensor.shape)}, and {_KEY} names {len(ids)} tokens of it",
                hint="the configuration and the weights do not belong together",
            )
        found[module] = TokenRows(name, ids, tensor.shape[1])
    if asked:
        raise ConfigError(
            f"adapter {folder!r} lacks the rows of the tokens that {_KEY} names of "
            f"{printable(next(iter(asked)), 100)}",
            hint="save or download it again",
        )
    return found


def _asked(given: object, folder: str) -> dict[str, tuple[int, ...]]:
    """Last part of a module's name -> ids, from `trainable_token_indices`."""
    if given in (None, [], {}):
        return {}
    by_name = given if is_object(given) else {EMBEDDING: given}
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in by_name.items():
        are_ids = is_list(ids) and all(type(token) is int and token >= 0 for token in ids)
        if not are_ids or not is_list(ids) or not 0 < len(ids) <= _MAX_TOKENS:
            raise ConfigError(
                f"adapter {folder!r}: {_KEY} must list 1 to {_MAX_TOKENS:,} ids of tokens",
                hint="save or download it again",
            )
        chosen = tuple(token for token in ids if isinstance(token, int))
        if len(set(chosen)) < len(chosen):
            raise ConfigError(
                f"adapter {folder!r}: {_KEY} names a token twice",
                hint="save or download it again",
            )
        found[name] = chosen
    return found


_WRAPPED = re.compile(r"(.+\.experts)((?:\.base_layer)*)")
_STACK = re.compile(r".+\.experts\.(?:gate_up_proj|up_proj|gate_proj|down_proj)")
_FIRST = ("gate_up_proj", "up_proj")


def is_stack(module: str) -> bool:
    """Whether a module is a parameter that holds all experts of a layer."""
    return bool(_STACK.fullmatch(module))


def stacks_by_parameter(
    file: SafetensorsFile,
    found: Mapping[str, dict[str, str]],
    parameters: tuple[str, ...],
    folder: str,
) -> dict[str, dict[str, str]]:
    """Rename PEFT's wrapper modules to the parameters that they adapt. PEFT nests the wrappers
    (".experts.base_layer", ".experts") with the first parameter innermost.

    Args:
        parameters: names from `target_parameters`, or suffixes of them.

    Raises:
        ConfigError: the number of wrappers and of parameters differ.
    """
    plain = {name: both for name, both in found.items() if not _WRAPPED.fullmatch(name)}
    wrapped: dict[str, list[str]] = {}
    for name in sorted(found, key=len, reverse=True):
        if match := _WRAPPED.fullmatch(name):
            wrapped.setdefault(match[1], []).append(name)
    for block, layers in wrapped.items():
        named = [
            name
            for name in (*_FIRST, "down_proj")
            if any(f".{block}.{name}".endswith(f".{parameter}") for parameter in parameters)
        ]
        if len(layers) != len(named):
            raise ConfigError(
                f"adapter {folder!r}: {printable(block, 100)} has matrices for {len(layers)} "
                f"stacked parameters, and target_parameters names {len(named)} "
                f"({', '.join(named) or 'none'})",
                hint="the configuration and the weights do not belong together",
            )
        names = named if not _is_reversed(file, found, layers) else named[::-1]
        for parameter, layer in zip(names, layers, strict=True):
            plain[f"{block}.{parameter}"] = found[layer]
    return plain


def _is_reversed(
    file: SafetensorsFile, found: Mapping[str, dict[str, str]], layers: list[str]
) -> bool:
    """Whether the innermost of two parameters is the down projection, whose inputs are half of the
    other one's outputs."""
    shapes = [
        (file.tensors[both["A"]].shape, file.tensors[both["B"]].shape)
        for both in (found[layer] for layer in layers)
        if len(both) == 2
    ]
    if len(shapes) != 2 or any(len(shape) != 2 for both in shapes for shape in both):
        return False
    (inner_in, inner_out), (outer_in, outer_out) = ((a[1], b[0]) for a, b in shapes)
    return (inner_out, outer_out) == (outer_in, 2 * inner_in)
