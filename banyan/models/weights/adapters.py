"""From an adapter's tensors to this rank's share of them, by projection of the model.

Knows names, files and cuts; what is done with the matrices is the op's. An adapter fits wholly or
not at all: every tensor has its projection, and every projection that it claims has its tensors.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.adapter_card import (
    DORA,
    EMBEDDING,
    EXPANSION,
    HEAD,
    KINDS,
    AdapterCard,
    LowRank,
    Whole,
)
from banyan.config.adapters import read_adapter
from banyan.config.card import ModelCard
from banyan.families import FAMILIES
from banyan.formats.gguf import GGUFFile
from banyan.formats.mapped import MappedFile
from banyan.formats.safetensors import SafetensorsFile
from banyan.layers.adapted import AdapterSeats, Projection, projections
from banyan.layers.build import Build
from banyan.layers.slot import WeightSlot
from banyan.models.base import Model
from banyan.models.decoder import DecoderLM
from banyan.models.weights.adapter_heads import ENDING, head_parts, open_heads, seat_on_paper
from banyan.models.weights.adapter_rows import (
    MERGE,
    Gains,
    Share,
    base_weights,
    check_end,
    end_part,
    own_rows,
    shares_of,
    whole_part,
)
from banyan.models.weights.names import Place, place_of
from banyan.models.weights.reader import as_tensor
from banyan.ops.adapter_rows import RowPart
from banyan.ops.adapters import MAX_PARTS, Part
from banyan.ops.api import Ops
from banyan.ops.stored import StoredWeight

_DIGEST_BYTES = 16
_BLOCK = 1 << 20
_LATENT = ("squeeze", "query", "latent", "out")
"""Projections of latent attention that are products by themselves."""
_END_KINDS = {"embedding": EMBEDDING, "head": HEAD}
_SHORT = 64
"""Tokens of a model that is never run."""


@dataclass(frozen=True)
class LoadedAdapter:
    """
    Attributes:
        parts: projection of the model -> what the adapter adds there on this rank.
        rows: what it does to whole rows; projection, "embedding" or "head" -> what.
        digest: of the files; the same on every rank.
    """

    parts: Mapping[str, list[Part]]
    rows: Mapping[str, RowPart]
    digest: str
    rank: int


@dataclass(frozen=True)
class Base:
    """What an adapter must fit: the model of one rank, without its weights.

    Attributes:
        stage: the layers that the rank has.
        shares: what it has of the vocabulary.
    """

    card: ModelCard
    stage: range
    seats: AdapterSeats
    shares: Mapping[str, Share]


def open_projections(model: Model, seats: AdapterSeats, ops: Ops) -> None:
    """Wrap the projections that adapters may change."""
    assert isinstance(model, DecoderLM)
    for name, projection in _open(model, seats):
        seats.wrap(name, projection, ops)
    open_heads(model, seats, ops)
    seats.wrap_ends(model.embedding, model.head, ops)


def base_on_paper(card: ModelCard, ops: Ops) -> Base:
    """What adapters of a model must fit, without its weights."""
    model = DecoderLM(card, FAMILIES.load(card.architecture), Build(ops), _SHORT)
    seats = AdapterSeats(max_rank=1, capacity=0, kinds=KINDS)
    for name, _ in _open(model, seats):
        seats.seat(name)
    seat_on_paper(model, seats)
    return base_of(model, seats)


def _open(model: DecoderLM, seats: AdapterSeats) -> Iterator[tuple[str, Projection]]:
    """The projections that adapters may change; of those that are closed, the sizes are kept."""
    named = _named(model.card)
    for name, projection in projections(model):
        if stems := named.get(_template(name), ()):
            seats.slots[name] = projection.slots()["weight"]
            if not seats.targets or any(stem in seats.targets for stem in stems):
                yield name, projection


def base_of(model: Model, seats: AdapterSeats) -> Base:
    """What adapters of `model` must fit, once its projections are open."""
    assert isinstance(model, DecoderLM)
    return Base(model.card, model.stage, seats, shares_of(model))


def load_adapter(path: str, base: Base) -> LoadedAdapter:
    """This rank's share of the adapter in a folder.

    Raises:
        ConfigError: it cannot be served, or does not fit the model.
    """
    card = read_adapter(path, base.seats.max_rank)
    fit = Fit(base, card)
    found: dict[str, list[Part]] = {}
    rows: dict[str, RowPart] = {}
    scaled: dict[str, tuple[Place, Tensor, Tensor]] = {}
    with _opened(card) as file:
        for name, low_rank in card.modules.items():
            place = fit.place_of(name, low_rank)
            if place is None:
                continue  # of a layer that another rank has
            down, up = (_stored(file, tensor, card) for tensor in low_rank.names)
            if place.module in base.shares:
                share = base.shares[place.module]
                both = (down.dense, up.dense)
                rows[place.module] = end_part(place.module, share, *both, low_rank.scale)
                continue
            slot = base.seats.slots[place.module]
            if place.module.endswith(ENDING):
                assert base.card.latent is not None
                facts = (base.card.latent, down, up, low_rank.scale)
                found.update(head_parts(place.module, slot, *facts))
                continue
            mine = _parts(slot, place, down, up, low_rank.scale)
            found.setdefault(place.module, []).extend(mine)
            if low_rank.magnitude:
                change = low_rank.scale * (up.dense.float() @ down.dense.float())
                length = _stored(file, low_rank.magnitude, card).dense.float()
                scaled[f"{name}.weight"] = (place, change, length)
        for name, whole in card.saved.items():
            place = fit.place_of_whole(name, whole)
            if not whole.is_copy:
                weight = _stored(file, whole.name, card).dense
                rows[place.module] = whole_part(place.module, base.shares[place.module], weight)
    fit.check_claims()
    return LoadedAdapter(found, rows | _gains(card, base, scaled), _digest(card), card.rank)


def _gains(
    card: AdapterCard, base: Base, scaled: Mapping[str, tuple[Place, Tensor, Tensor]]
) -> dict[str, RowPart]:
    """Rows of weight and matrices together are brought to the lengths that the adapter says.

    Args:
        scaled: name of a weight -> its place, what the adapter adds to it, the lengths.
    """
    if not scaled:
        return {}
    gains = Gains(base.seats.slots, base.seats.biases)
    for name, weight in base_weights(base.card, set(scaled), printable(card.path, 200)):
        place, change, length = scaled[name]
        gains.add(place, length / (weight + change).norm(dim=1))
    return gains.parts()


def check_numbers(card: AdapterCard) -> None:
    """ConfigError when a number of the adapter is none."""
    with _opened(card) as file:
        for low_rank in card.modules.values():
            for tensor in filter(None, (*low_rank.names, low_rank.magnitude)):
                _stored(file, tensor, card)
        for whole in card.saved.values():
            _stored(file, whole.name, card)


def _opened(card: AdapterCard) -> MappedFile:
    if card.format == "gguf":
        return GGUFFile.open(card.weights, has_words=False)
    return SafetensorsFile.open(card.weights)


def _stored(file: MappedFile, name: str, card: AdapterCard) -> StoredWeight:
    """In memory of its own, as the file may be written anew while it is used."""
    tensor = file.tensors[name]
    raw = as_tensor(file.bytes_of(name)).clone()
    stored = StoredWeight.from_bytes(tensor.type, tensor.shape, raw)
    if wrong := int((~stored.dense.isfinite()).sum()):
        raise ConfigError(
            f"adapter {printable(card.path, 200)!r}: {wrong:,} numbers of "
            f"{printable(name, 120)} are not finite (NaN or infinite)",
            hint="its training has failed, or the file is damaged",
        )
    return stored


def check_fit(card: AdapterCard, base: Base) -> None:
    """ConfigError when an adapter does not belong to a model; says why."""
    fit = Fit(base, card)
    for name, low_rank in card.modules.items():
        fit.place_of(name, low_rank)
    for name, whole in card.saved.items():
        fit.place_of_whole(name, whole)
    fit.check_claims()


class Fit:
    """Whether an adapter belongs to a model."""

    def __init__(self, base: Base, card: AdapterCard) -> None:
        self._card = card
        self._base = base
        self._folder = printable(card.path, 200)
        names = FAMILIES.load(base.card.architecture).names
        if card.format not in names or (card.format == "gguf" and base.card.state is not None):
            raise ConfigError(
                f"adapter {self._folder!r}: GGUF adapters of {base.card.architecture} are not "
                "served",
                hint="take the adapter in PEFT's form",
            )
        self._names = names[card.format]

    def place_of(self, name: str, low_rank: LowRank) -> Place | None:
        """Where a module's matrices go; None on another rank.

        Raises:
            ConfigError: the model has no such projection, or one of another size.
        """
        place = place_of(f"{name}.weight", self._names)
        if place is not None and place.module in self._base.shares:
            return self._end(name, place, low_rank)
        layer = place.module.split(".")[1] if place and place.module.startswith("layers.") else ""
        number = int(layer) if layer.isdecimal() else -1
        if place is None or not 0 <= number < self._base.card.num_layers:
            raise self._stranger(name, place)
        if number not in self._base.stage:
            return None
        slot = self._base.seats.slots.get(place.module)
        if slot is None or any(part not in slot.shapes for part in place.parts):
            raise self._stranger(name, place)
        if place.module.endswith(ENDING):
            self._check_heads(name, low_rank)
        elif place.module not in self._base.seats.tables:
            raise ConfigError(
                f"adapter {self._folder!r} changes {printable(name, 100)}, which "
                "--lora-target-modules leaves out",
                hint="name its target there, or leave the flag out",
            )
        if low_rank.magnitude:
            self._check_room(DORA, name)
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
        self._check_room(EXPANSION, name)
        if low_rank.magnitude or self._card.format == "gguf":
            what = "GGUF adapters" if self._card.format == "gguf" else "DoRA"
            raise self._not_served(name, what)

    def _not_served(self, name: str, what: str) -> ConfigError:
        return ConfigError(
            f"adapter {self._folder!r} changes {printable(name, 100)}: {what} of it are not served",
            hint=MERGE,
        )

    def place_of_whole(self, name: str, whole: Whole) -> Place:
        """Where a weight that the adapter brings goes.

        Raises:
            ConfigError: no weight of the base may be replaced there, or by that.
        """
        place = place_of(f"{name}.weight", self._names)
        if place is None or place.module not in self._base.shares or len(whole.shape) != 2:
            raise ConfigError(
                f"adapter {self._folder!r} brings {printable(name, 100)} as a whole: only "
                f"{EMBEDDING} and {HEAD} may be replaced (modules_to_save)",
                hint=MERGE,
            )
        if not whole.is_copy:
            self._check_room(_END_KINDS[place.module], name)
        self._check_end(name, place.module, True, whole.shape)
        return place

    def _end(self, name: str, place: Place, low_rank: LowRank) -> Place:
        is_looked_up = place.module == "embedding" or self._base.card.tie_embeddings
        if low_rank.magnitude or self._card.format == "gguf" and is_looked_up:
            what = "GGUF adapters" if self._card.format == "gguf" else "DoRA"
            raise self._not_served(name, what)
        self._check_room(_END_KINDS[place.module], name)
        shape = (low_rank.outputs, low_rank.inputs)
        is_turned = place.module == "embedding"
        self._check_end(name, place.module, False, shape[::-1] if is_turned else shape)
        return place

    def _check_end(self, name: str, module: str, is_whole: bool, shape: tuple[int, ...]) -> None:
        try:
            check_end(self._base.card, module, is_whole, *shape)
        except ConfigError as error:
            raise ConfigError(
                f"adapter {self._folder!r} changes {printable(name, 100)}: {error.text}",
                hint=error.hint,
            ) from None

    def _check_room(self, kind: str, name: str) -> None:
        if kind not in self._base.seats.kinds:
            flag = "" if kind == DORA else f", or write --lora-target-modules all {kind}"
            raise ConfigError(
                f"adapter {self._folder!r} changes {printable(name, 100)} ({kind}), and the server "
                "was started without room for that",
                hint=f"name such an adapter in --lora-paths at the start{flag}",
            )

    def check_claims(self) -> None:
        """ConfigError when a layer lacks a projection that the adapter says it changes."""
        lacking = [name for name in self._claimed() if name not in self._card.modules]
        if lacking:
            raise ConfigError(
                f"adapter {self._folder!r} lacks the matrices of {len(lacking)} projections that "
                f"its configuration names: {', '.join(lacking[:3])}",
                hint="save or download it again",
            )

    def _claimed(self) -> list[str]:
        # Layers of several kinds may have one projection under several names.
        counts = Counter(self._names.modules.values())
        templates = [
            template
            for template, target in self._names.modules.items()
            if counts[target] == 1
            and template.rpartition(".")[2] in self._card.targets
            and target.startswith("layers.{}.")
            and template.count("{}") == 1
        ]
        found = []
        for number in self._base.stage:
            for template in templates:
                name = template.format(number)
                place = place_of(f"{name}.weight", self._names)
                slot = None if place is None else self._base.seats.slots.get(place.module)
                if slot and place and all(part in slot.shapes for part in place.parts):
                    found.append(name)
        return found

    def _stranger(self, name: str, place: Place | None) -> ConfigError:
        module = "" if place is None else place.module
        hint = MERGE
        if ".experts" in module or ".experts" in name or "_exps" in name:
            why = "experts take no adapters here: their tokens are sorted by expert, not by adapter"
        elif module.endswith(".router"):
            why = "which experts a token goes to is not adapted here"
        elif ".attention.indexer." in module:
            why = "what an indexer reads takes no adapters here"
        else:
            why = f"the model has no such projection{self._made_for()}"
            hint = "serve the model that it was made for"
        return ConfigError(
            f"adapter {self._folder!r} changes {printable(name, 100)}: {why}", hint=hint
        )

    def _made_for(self) -> str:
        return f" (it was made for {printable(self._card.base, 80)})" if self._card.base else ""


def _named(card: ModelCard) -> dict[str, list[str]]:
    """Projections of blocks that take adapters, with {} for the layer -> the last parts of the
    names under which checkpoints have them."""
    names = FAMILIES.load(card.architecture).names["safetensors"]
    found: dict[str, list[str]] = {}
    for template, target in names.modules.items():
        module = target.partition(":")[0]
        is_latent = card.latent is not None and ".attention." in module
        if is_latent and module.rpartition(".")[2] not in _LATENT:
            continue
        if module.startswith("layers.{}.") and module.count("{}") == 1:
            found.setdefault(module, []).append(template.rpartition(".")[2])
    return found


def _template(module: str) -> str:
    """ "layers.3.mlp.down" -> "layers.{}.mlp.down"."""
    first, _, rest = module.split(".", 2)
    return f"{first}.{{}}.{rest}"


def _parts(
    slot: WeightSlot, place: Place, down: StoredWeight, up: StoredWeight, scale: float
) -> list[Part]:
    """What lies beside this rank's share of a projection, by part."""
    found: list[Part] = []
    for part, first, rows in own_rows(slot, place, up):
        rule = slot.rules[part]
        matrix = rule.cut(down, slot.group) if rule.dim == 1 else down
        found.append(Part(first, matrix.dense.contiguous(), rows.dense.contiguous(), scale))
    assert len(found) <= MAX_PARTS
    return found


def _digest(card: AdapterCard) -> str:
    """Of the configuration and the weights: equal ones mean equal answers."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in card.files:
        with Path(name).open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()
