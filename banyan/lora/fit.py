"""FitCheck: whether an adapter fits a model. Every tensor needs a place, and every projection that
the configuration names needs tensors. Checks names and shapes only."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.families import FAMILIES
from banyan.families.names import NameMap
from banyan.families.nested import NESTED
from banyan.lora.adapter_config import (
    CLASSES,
    DORA,
    EMBEDDING,
    ENCODER_CLASSES,
    EXPANSION,
    EXPERTS,
    HEAD,
    ROUTER,
    AdapterConfig,
    LowRank,
    ReplacedWeight,
    TokenRows,
)
from banyan.lora.adapter_files import names_token
from banyan.lora.layers import EXPANSION_SUFFIX, ROUTER_SUFFIX
from banyan.lora.load_parts import (
    BODY,
    MERGE,
    ExpertPlace,
    ExpertSlot,
    VocabularyShare,
    check_end,
    check_experts,
    check_tokens,
    expert_place,
    experts_mismatch,
    lacking_experts,
    module_place,
)
from banyan.lora.targets import HEADS, LoRATargets
from banyan.model_config.model_config import ModelConfig
from banyan.models.weights.names import WeightPlace, place_of

_T = TypeVar("_T")
_END_KINDS = {"embedding": EMBEDDING, **dict.fromkeys(HEADS, HEAD)}


@dataclass(frozen=True)
class Base:
    """The model of one rank, without weights, that adapters must fit.

    Attributes:
        stage: the layers of this rank.
        shares: this rank's part of the vocabulary.
        experts: the projections of experts.
    """

    model_config: ModelConfig
    stage: range
    lora_targets: LoRATargets
    shares: Mapping[str, VocabularyShare]
    experts: Mapping[str, ExpertSlot]


def with_full_names(adapter_config: AdapterConfig, base: Base) -> AdapterConfig:
    """An adapter with the module names of the whole model. An adapter for the body alone
    (`AutoModel`) lacks their prefix. Changes to the pooler of an encoder without classes have no
    effect and are dropped."""
    names = FAMILIES.load(base.model_config.architecture).names.get(adapter_config.format)
    if names is None:
        return adapter_config
    ignored = names.ignored if base.model_config.is_encoder and not base.model_config.labels else ()

    nested = NESTED.get(base.model_config.outer)

    def renamed(named: Mapping[str, _T]) -> dict[str, _T]:
        found: dict[str, _T] = {}
        for name, value in named.items():
            if nested is not None:
                name = nested.text_name(f"{name}.") or f"{name}."
                name = name.removesuffix(".")
            longer = f"{BODY}{name}"
            is_short = not _is_known(name, names) and _is_known(longer, names)
            if f"{name}.weight" not in ignored:
                found[longer if is_short and longer not in named else name] = value
        return found

    modules, saved = renamed(adapter_config.modules), renamed(adapter_config.saved)
    return replace(
        adapter_config, modules=modules, saved=saved, tokens=renamed(adapter_config.tokens)
    )


def _is_known(name: str, names: NameMap) -> bool:
    return bool(module_place(name, names) or expert_place(name, names))


class FitCheck:
    """Where each tensor of an adapter goes in a model."""

    def __init__(self, base: Base, adapter_config: AdapterConfig) -> None:
        self._adapter_config = adapter_config
        self._base = base
        self._folder = printable(adapter_config.path, 200)
        names = FAMILIES.load(base.model_config.architecture).names
        if adapter_config.format not in names or (
            adapter_config.format == "gguf" and base.model_config.state is not None
        ):
            raise ConfigError(
                f"adapter {self._folder!r}: GGUF adapters of {base.model_config.architecture} "
                "are not "
                "served",
                hint="take the adapter in PEFT's form",
            )
        self._check_tokenizer()
        self._names = names[adapter_config.format]
        self.is_interleaved = self._names.has_gates_between

    def _check_tokenizer(self) -> None:
        """ConfigError if the adapter's own tokenizer has tokens beyond the base model's vocabulary.
        Some base tokenizers have such tokens too; those are accepted."""
        base, highest = self._base.model_config, self._adapter_config.highest_token
        if highest < base.vocab_size or names_token(base.path, highest):
            return
        try:
            check_tokens(base, highest + 1)
        except ConfigError as error:
            raise ConfigError(
                f"adapter {self._folder!r} came with a tokenizer of its own: {error.text}",
                hint=f"{error.hint}; or take the tokenizer out of its folder, where nobody needs "
                "these tokens",
            ) from None

    def expert_place(self, name: str, low_rank: LowRank) -> ExpertPlace | None:
        """Where matrices of experts go; None if they are for something else.

        Raises:
            ConfigError: the model has no such experts.
        """
        place = expert_place(name, self._names)
        if place is None or self._base.model_config.experts is None:
            return None
        if not 0 <= place.layer < self._base.model_config.num_layers:
            raise self._no_such_projection(name, None)
        if place.layer not in self._base.stage:
            return place
        if (slot := self._base.experts.get(place.module)) is None:
            raise self._no_such_projection(name, None)
        self._check_kind_enabled(EXPERTS, name)
        if low_rank.magnitude:
            raise self._not_served(name, "DoRA")
        if why := check_experts(place, slot, low_rank):
            raise experts_mismatch(name, why, self._folder, self._made_for())
        return place

    def place_of(self, name: str, low_rank: LowRank) -> WeightPlace | None:
        """Where the matrices of a module go; None if on another rank.

        Raises:
            ConfigError: the model has no such projection, or one with another size.
        """
        place = module_place(name, self._names)
        if place is not None and place.module in self._base.shares:
            return self._end(name, place, low_rank)
        layer = place.module.split(".")[1] if place and place.module.startswith("layers.") else ""
        number = int(layer) if layer.isdecimal() else -1
        if place is None or not 0 <= number < self._base.model_config.num_layers:
            raise self._no_such_projection(name, place)
        if number not in self._base.stage:
            return None
        slot = self._base.lora_targets.slots.get(place.module)
        if slot is None or any(part not in slot.shapes for part in place.parts):
            raise self._no_such_projection(name, place)
        if place.module.endswith(EXPANSION_SUFFIX):
            self._check_heads(name, low_rank)
        elif place.module.endswith(ROUTER_SUFFIX):
            self._check_kind_enabled(ROUTER, name)
            if low_rank.magnitude:
                raise self._not_served(name, "DoRA")
        elif place.module not in self._base.lora_targets.tables:
            raise ConfigError(
                f"adapter {self._folder!r} changes {printable(name, 100)}, which "
                "--lora-target-modules leaves out",
                hint="name its target there, or leave the flag out",
            )
        if low_rank.magnitude:
            self._check_kind_enabled(DORA, name)
        declared = [slot.shapes[part] for part in place.parts]
        outputs, inputs = sum(shape[0] for shape in declared), declared[0][1]
        if (outputs, inputs) != (low_rank.outputs, low_rank.inputs):
            raise ConfigError(
                f"adapter {self._folder!r} is of another base: {printable(name, 100)} has "
                f"{low_rank.inputs} inputs and {low_rank.outputs} outputs there, {inputs} and "
                f"{outputs} here{self._made_for()}",
                hint="serve the model that it was made for",
            )
        return place

    def _check_heads(self, name: str, low_rank: LowRank) -> None:
        self._check_kind_enabled(EXPANSION, name)
        if low_rank.magnitude or self._adapter_config.format == "gguf":
            what = "GGUF adapters" if self._adapter_config.format == "gguf" else "DoRA"
            raise self._not_served(name, what)

    def _not_served(self, name: str, what: str) -> ConfigError:
        return ConfigError(
            f"adapter {self._folder!r} changes {printable(name, 100)}: {what} of it are not served",
            hint=MERGE,
        )

    def place_of_whole(self, name: str, whole: ReplacedWeight) -> WeightPlace:
        """Where a replaced weight goes.

        Raises:
            ConfigError: this weight of the base model cannot be replaced.
        """
        heads = {CLASSES, ENCODER_CLASSES}.intersection(name.split("."))
        if heads and not self._base.model_config.labels:
            raise ConfigError(
                f"adapter {self._folder!r} brings a head of classes ({heads.pop()}), and the base "
                "scores none",
                hint="save the base as a model for sequence classification with as many classes "
                "(num_labels), and serve that",
            )
        place = place_of(f"{name}.weight", self._names)
        if place is None or place.module not in self._base.shares or len(whole.shape) != 2:
            raise ConfigError(
                f"adapter {self._folder!r} brings {printable(name, 100)} as a whole: only "
                f"{self._ends_here()} may be replaced (modules_to_save)",
                hint=MERGE,
            )
        if not whole.is_copy:
            self._check_kind_enabled(_END_KINDS[place.module], name)
            self._check_bias(name, place.module, whole)
        self._check_end(name, place.module, True, whole.shape)
        return place

    def _check_bias(self, name: str, module: str, whole: ReplacedWeight) -> None:
        has_one = module in HEADS[1:]
        if has_one == bool(whole.bias):
            return
        if has_one:
            raise ConfigError(
                f"adapter {self._folder!r} lacks {printable(name, 100)}.bias, which the base has",
                hint="save or download it again",
            )
        raise ConfigError(
            f"adapter {self._folder!r} brings {printable(name, 100)}.bias, and the base's has none",
            hint=MERGE,
        )

    def _ends_here(self) -> str:
        """The weights of this model that can be replaced."""
        if HEADS[2] in self._base.shares:
            return f"{EMBEDDING} and {ENCODER_CLASSES}"
        if "head" not in self._base.shares:
            return EMBEDDING
        return f"{EMBEDDING} and {CLASSES if self._base.model_config.labels else HEAD}"

    def ends_of(self, name: str, tokens: TokenRows) -> list[str]:
        """Where rows of single tokens go. If embedding and head are tied, to both, as in PEFT,
        unless the adapter has separate rows for the head.

        Raises:
            ConfigError: the base model has no such tokens there.
        """
        place = place_of(f"{name}.weight", self._names)
        if place is None or place.module not in self._base.shares:
            raise self._no_such_projection(name, place)
        ends = [place.module]
        is_tied = self._base.model_config.tie_embeddings and not self._base.model_config.labels
        if is_tied and len(self._adapter_config.tokens) == 1:
            ends = [end for end in ("embedding", "head") if end in self._base.shares]
        twice = {*self._adapter_config.modules, *self._adapter_config.saved}
        if name in twice:
            raise ConfigError(
                f"adapter {self._folder!r} changes {printable(name, 100)} as a whole and by single "
                "tokens",
                hint=MERGE,
            )
        if "head" in ends and self._base.model_config.labels:
            raise self._not_served(name, "Single rows of scores")
        rows = max(self._base.model_config.vocab_size, max(tokens.ids) + 1)
        for end in ends:
            self._check_kind_enabled(_END_KINDS[end], name)
            self._check_end(name, end, True, (rows, tokens.width))
        return ends

    def _end(self, name: str, place: WeightPlace, low_rank: LowRank) -> WeightPlace:
        is_looked_up = place.module == "embedding" or self._base.model_config.tie_embeddings
        if low_rank.magnitude or self._adapter_config.format == "gguf" and is_looked_up:
            what = "GGUF adapters" if self._adapter_config.format == "gguf" else "DoRA"
            raise self._not_served(name, what)
        self._check_kind_enabled(_END_KINDS[place.module], name)
        shape = (low_rank.outputs, low_rank.inputs)
        is_turned = place.module == "embedding"
        self._check_end(name, place.module, False, shape[::-1] if is_turned else shape)
        return place

    def _check_end(self, name: str, module: str, is_whole: bool, shape: tuple[int, ...]) -> None:
        try:
            check_end(self._base.model_config, module, is_whole, *shape)
        except ConfigError as error:
            raise ConfigError(
                f"adapter {self._folder!r} changes {printable(name, 100)}: {error.text}",
                hint=error.hint,
            ) from None

    def _check_kind_enabled(self, kind: str, name: str) -> None:
        if kind not in self._base.lora_targets.kinds:
            flag = "" if kind == DORA else f", or write --lora-target-modules all {kind}"
            raise ConfigError(
                f"adapter {self._folder!r} changes {printable(name, 100)} ({kind}), and the server "
                "was started without memory for that",
                hint=f"name such an adapter in --lora-paths at the start{flag}",
            )

    def check_claims(self) -> None:
        """ConfigError if a layer lacks a projection that the configuration names, or if the adapter
        replaces only one of the two projections of a head."""
        there = {module_place(name, self._names) for name in self._adapter_config.modules}
        claimed: dict[WeightPlace | None, str] = {}  # a body may have two names
        for name in self._claimed():
            claimed.setdefault(module_place(name, self._names), name)
        lacking = [name for place, name in claimed.items() if place not in there]
        lacking += lacking_experts(self._adapter_config, self._names, self._base.experts)
        inside = [
            name for name in self._adapter_config.saved if ENCODER_CLASSES in name.split(".")[:-1]
        ]
        if len(inside) == 1:
            raise ConfigError(
                f"adapter {self._folder!r} brings {printable(inside[0], 100)} alone of a head of "
                "two projections",
                hint="save or download it again",
            )
        if lacking:
            raise ConfigError(
                f"adapter {self._folder!r} lacks the matrices of {len(lacking)} projections that "
                f"its configuration names: {', '.join(lacking[:3])}",
                hint="save or download it again",
            )

    def _claimed(self) -> list[str]:
        # Layers of several kinds may have one projection under several names.
        stems = {(target, name.rpartition(".")[2]) for name, target in self._names.modules.items()}
        counts = Counter(target for target, _ in stems)
        templates = [
            template
            for template, target in self._names.modules.items()
            if counts[target] == 1
            and template.rpartition(".")[2] in self._adapter_config.targets
            and target.startswith("layers.{}.")
            and template.count("{}") == 1
        ]
        found = []
        for number in self._base.stage:
            for template in templates:
                name = template.format(number)
                place = place_of(f"{name}.weight", self._names)
                slot = None if place is None else self._base.lora_targets.slots.get(place.module)
                if slot and place and all(part in slot.shapes for part in place.parts):
                    found.append(name)
        return found

    def _no_such_projection(self, name: str, place: WeightPlace | None) -> ConfigError:
        module = "" if place is None else place.module
        hint = MERGE
        if ".attention.indexer." in module:
            why = "projections of an indexer take no adapters here"
        else:
            why = f"the model has no such projection{self._made_for()}"
            hint = "serve the model that it was made for"
        return ConfigError(
            f"adapter {self._folder!r} changes {printable(name, 100)}: {why}", hint=hint
        )

    def _made_for(self) -> str:
        return (
            f" (it was made for {printable(self._adapter_config.base, 80)})"
            if self._adapter_config.base
            else ""
        )
