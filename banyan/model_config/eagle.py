"""Models that were trained to draft for another one, EAGLE and EAGLE3: what their configurations
say, and what they do not go with. Part of `model_config/draft_model.py`; loads no weights.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

from banyan.base.errors import ConfigError, ModelError
from banyan.base.json_types import is_list
from banyan.base.log import printable
from banyan.config.schema import Config, LoadConfig, SpeculativeConfig
from banyan.families.base import MAX_WIDTH
from banyan.model_config.checkpoint import PICKLED, read_model_config
from banyan.model_config.facts import Facts, read_json
from banyan.model_config.model_config import DraftModelFields, ModelConfig

_PLAIN = "LlamaForCausalLM"
_THIRD = "EAGLE3"
_CLASSES = {
    "EAGLE": ("LlamaForCausalLMEagle", _PLAIN),
    _THIRD: ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", _PLAIN),
}
"""Algorithm -> classes that configurations of its draft models name."""
_FOLLOWED = (_PLAIN, "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Classes of models that they draft for."""
_ANOTHER = "use --speculative-algorithm STANDALONE with a small model, or NGRAM"
_MAP = "--speculative-token-map"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_MOST_TAPS = 8


def eagle_model_config(
    speculative: SpeculativeConfig, model: LoadConfig, served: ModelConfig
) -> ModelConfig:
    """Card of a draft model, for the model of `served`.

    Raises:
        ConfigError, ModelError: it cannot be read, or is not of the kind that is asked for.
    """
    name = f"--speculative-draft-model-path {printable(model.source)}"
    where = os.path.join(model.path, "config.json")
    facts = read_json(where, is_needed=True)
    algorithm, named = speculative.algorithm, facts.get("architectures")
    kind = _kind_of(facts, algorithm)
    if kind != algorithm:
        raise ConfigError(
            f"{name}: --speculative-algorithm {algorithm} reads draft models of "
            f"{', '.join(_CLASSES[algorithm])}, and this is {printable(str(named), 80)}"
            + (f" of {kind}'s kind" if kind else ""),
            hint=f"use --speculative-algorithm {kind}" if kind else _ANOTHER,
        )
    if _is_pickled(model.path):
        raise ModelError(
            f"{name} keeps its weights in a pickle, which can run code when opened",
            hint="on a machine you trust with it, run in that folder, once: python -c 'import "
            "torch; from safetensors.torch import save_file; save_file({k: v.contiguous() for k, "
            'v in torch.load("pytorch_model.bin", weights_only=True).items()}, '
            '"model.safetensors")\'',
        )
    model_config = read_model_config(
        model.path, model.load_format, overrides={"architectures": [_PLAIN]}
    )
    if kind != _THIRD:
        tokens = _mapped(speculative.token_map, served.vocab_size)
        return (
            replace(model_config, eagle=DraftModelFields(len(tokens), tokens=tokens))
            if tokens
            else model_config
        )
    eagle = _eagle_facts(Facts(facts, where), model_config, served, name)
    return replace(model_config, eagle=eagle, tie_embeddings=False)


def _mapped(path: str, vocab_size: int) -> tuple[int, ...]:
    """The ids in the file of a token map, from the lowest on; () where none is named."""
    if not path:
        return ()
    from banyan.formats.token_map import read_token_map  # numpy is loaded where a file is named

    ids = read_token_map(path, _MAP)
    wrong = next((each for each in ids if not 0 <= each < vocab_size), None)
    if not ids or wrong is not None or len(set(ids)) < len(ids):
        why = "no token" if not ids else "a token twice"
        why = why if wrong is None else f"token {wrong}, the model has {vocab_size:,}"
        raise ConfigError(f"{_MAP} {printable(path)} names {why}", hint="name another file")
    return tuple(sorted(ids))


def refuse_the_map(speculative: SpeculativeConfig) -> None:
    """Refuse a token map where nothing reads it."""
    if not speculative.token_map or (speculative.is_eagle and speculative.algorithm == "EAGLE"):
        return
    why = "it is for --speculative-algorithm EAGLE with --speculative-draft-model-path"
    if speculative.algorithm == _THIRD:
        why = "a model of EAGLE3 says itself which tokens it knows"
    raise ConfigError(
        f"{_MAP} and --speculative-algorithm {speculative.algorithm}: {why}", hint="leave it out"
    )


def _kind_of(facts: Mapping[str, object], asked: str) -> str:
    """The algorithm that a draft model is for, "" for none of these."""
    named = facts.get("architectures")
    if not is_list(named):
        return ""
    kinds = [kind for kind, its in _CLASSES.items() if set(map(str, named)) & set(its)]
    if len(kinds) > 1:  # both are known by Llama's name
        return _THIRD if "draft_vocab_size" in facts else asked
    return kinds[0] if kinds else ""


def _is_pickled(folder: str) -> bool:
    names = os.listdir(folder)
    has_others = any(name.endswith((".safetensors", ".gguf")) for name in names)
    return not has_others and any(name.endswith(PICKLED) for name in names)


def _eagle_facts(
    facts: Facts, model_config: ModelConfig, served: ModelConfig, name: str
) -> DraftModelFields:
    """What a draft model of EAGLE3 says beside the sizes of its block."""
    known = facts.integer(
        "draft_vocab_size", 1, model_config.vocab_size, default=model_config.vocab_size
    )
    told = facts.part("eagle_config") or Facts({}, "")
    apart = {
        "num_hidden_layers": model_config.num_layers != 1,
        "use_aux_hidden_state": not told.flag("use_aux_hidden_state", default=True),
        "norm_before_residual": facts.flag("norm_before_residual", default=False),
        "target_hidden_size": facts.integer("target_hidden_size", 0, MAX_WIDTH, default=0)
        not in (0, served.hidden_size),
    }
    for key, is_apart in apart.items():
        if is_apart:
            raise ConfigError(
                f"{name}: {key} is not what models of EAGLE3 have here: one block, which reads "
                f"{served.hidden_size:,} numbers of some layers of the served model",
                hint=_ANOTHER,
            )
    # What is listed are layers whose outputs are read: the inputs of those behind them.
    taps: list[object] = [
        layer + 1 if isinstance(layer, int) and not isinstance(layer, bool) else layer
        for layer in told.listed(_TAPS) or facts.listed(_TAPS)
    ]
    if not taps:
        taps = [2, served.num_layers // 2, served.num_layers - 3]
    numbers = sorted(tap for tap in taps if isinstance(tap, int) and 0 <= tap < served.num_layers)
    if len(numbers) < len(taps) or len(taps) > _MOST_TAPS:
        raise ConfigError(
            f"{name} reads the inputs of layers {printable(str(taps), 80)} ({_TAPS}), the served "
            f"model has {served.num_layers:,}",
            hint="name the draft model that was trained for this model",
        )
    return DraftModelFields(known, tuple(numbers))


def check_the_eagle(
    config: Config, model_config: ModelConfig, draft: ModelConfig, name: str
) -> None:
    """Refuse a model that cannot read the served one's hidden states."""
    if model_config.architecture not in _FOLLOWED or config.model.implementation == "transformers":
        raise ConfigError(
            f"--speculative-algorithm {config.speculative.algorithm}: "
            f"{printable(model_config.architecture)} is not drafted for by its hidden states; "
            f"{', '.join(_FOLLOWED)} are",
            hint=_ANOTHER,
        )
    if draft.hidden_size != model_config.hidden_size:
        raise ConfigError(
            f"{name} reads hidden states of {draft.hidden_size:,} numbers, those of the served "
            f"model have {model_config.hidden_size:,}",
            hint="name the one that was trained for this model",
        )
