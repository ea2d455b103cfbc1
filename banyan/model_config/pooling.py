"""Pooling and classification heads: sentence-transformers' modules.json, and id2label.

Source: modules.json and 1_Pooling/config.json as sentence-transformers documents them; id2label of
transformers' configuration classes.
"""

import json
import os
from dataclasses import replace

from banyan.base.errors import ModelError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import printable
from banyan.base.os import open_regular
from banyan.model_config.checkpoint_fields import CheckpointFields, read_json
from banyan.model_config.model_config import CLS, LAST, MEAN, ModelConfig, Pooling

MAX_LABELS = 1 << 16
MAX_IDS = 1 << 22
_MODES = {
    "pooling_mode_cls_token": CLS,
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_lasttoken": LAST,
}
_KNOWN = ("Transformer", "Pooling", "Normalize")


def is_classifier(architecture: str) -> bool:
    return architecture.endswith("ForSequenceClassification")


def is_bare(architecture: str) -> bool:
    """Whether the class has no head and returns hidden states."""
    return architecture.endswith("Model") and not architecture.endswith("LMHeadModel")


def labels_of(fields: CheckpointFields) -> tuple[str, ...]:
    """Names of the classes, in the order of the head's outputs."""
    named = fields.part("id2label")
    if named is None:
        count = fields.integer("num_labels", 1, MAX_LABELS, default=2)
        return tuple(f"LABEL_{i}" for i in range(count))
    asked = fields.any("id2label")
    count = len(asked) if is_object(asked) else 0
    if not 1 <= count <= MAX_LABELS:
        raise fields.error("id2label", count, f"1 to {MAX_LABELS:,} classes")
    return tuple(named.text(str(i)) for i in range(count))


def separator_of(path: str) -> int:
    """Id of BERT's [SEP], after which the second text of a pair begins; -1 = none."""
    file = os.path.join(path, "tokenizer.json")
    fields = CheckpointFields(read_json(file, is_needed=False), file)
    for entry in fields.listed("added_tokens"):
        if is_object(entry) and entry.get("content") == "[SEP]":
            return CheckpointFields(entry, file).integer("id", 0, MAX_IDS)
    return -1


def read_pooling(model_config: ModelConfig) -> Pooling:
    """The pooling of this model.

    Classifiers and models without modules.json use an encoder's first token or a decoder's last
    token. A classifier's scores are not normalized.

    Raises:
        ModelError: the folder names an unsupported pooling or module.
    """
    kind = CLS if model_config.is_encoder else LAST
    if model_config.labels:
        return Pooling(kind, normalize=False)
    modules = os.path.join(model_config.path, "modules.json")
    if not os.path.isfile(modules):
        return Pooling(kind)
    pooling = Pooling(kind, normalize=False)
    for name, folder in _modules(modules):
        if name not in _KNOWN:
            raise ModelError(
                f"{printable(modules)!r} asks for the module {printable(name, 80)}",
                hint=f"known: {', '.join(_KNOWN)}",
            )
        if name == "Pooling":
            pooling = replace(
                pooling, kind=_kind(os.path.join(model_config.path, folder, "config.json"))
            )
        if name == "Normalize":
            pooling = replace(pooling, normalize=True)
    return pooling


def _modules(path: str) -> list[tuple[str, str]]:
    """Class and folder of each module, in order."""
    try:
        with open_regular(path) as file:
            listed: object = json.loads(file.read(1 << 16))
    except (OSError, ValueError, RecursionError):
        listed = None
    parts = [CheckpointFields(e, path) for e in listed if is_object(e)] if is_list(listed) else []
    if not is_list(listed) or len(parts) != len(listed):
        raise ModelError(f"{printable(path)!r} is not a list of modules", hint="download it again")
    return [(p.text("type").rpartition(".")[2], os.path.basename(p.text("path"))) for p in parts]


def _kind(path: str) -> str:
    fields = CheckpointFields(read_json(path, is_needed=True), path)
    if fields.has("pooling_mode"):
        asked = [fields.text("pooling_mode")]
        found = [kind for kind in (CLS, MEAN, LAST) if asked[0] in (kind, f"{kind}token")]
    else:
        asked = [key for key in _plain_modes(path) if fields.flag(key, default=False)]
        found = [_MODES[key] for key in asked if key in _MODES]
    if len(asked) != 1 or len(found) != 1:
        raise ModelError(
            f"{printable(path)!r} pools by {', '.join(asked) or 'nothing'}",
            hint=f"one of {', '.join(_MODES)} is known here",
        )
    return found[0]


def _plain_modes(path: str) -> list[str]:
    return [key for key in read_json(path, is_needed=True) if key.startswith("pooling_mode_")]
