"""Multimodal checkpoints: the part of them that is a text model of another family.

Only that part is served. Weights of towers (vision, sound) and of their projectors are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""How transformers 5 names the text model's weights, and how it did before."""
_VISION = ("vision_tower.", "multi_modal_projector.")
_QWEN = ("visual.",)
_STEP = ("vision_model.", "vit_downsampler", "vit_large_projector.", "multi_modal_projector.")


@dataclass(frozen=True)
class NestedForm:
    """How a class of checkpoints holds its text model.

    Attributes:
        towers: prefixes of weights that are left out, with or without "model." in front.
        text: class of the text model; "" = its configuration names it.
        key: key of its configuration; without that key its fields are at the top level.
        prefixes: prefix of a weight's name -> prefix in checkpoints of the text model alone.
        values: fields of the configuration that this class fixes.
        may_turn_stacks: stacks of experts may have their inputs first, [experts, in, out].
    """

    towers: tuple[str, ...]
    text: str = ""
    key: str = "text_config"
    prefixes: Mapping[str, str] = field(default_factory=lambda: _TEXT_PREFIXES)
    values: Mapping[str, object] = field(default_factory=dict[str, object])
    may_turn_stacks: bool = False

    def text_name(self, name: str) -> str | None:
        """The name that a weight has in a checkpoint of the text model; None = it is left out."""
        if name.removeprefix("model.").startswith(self.towers):
            return None
        for prefix, its in self.prefixes.items():
            if name.startswith(prefix):
                return its + name.removeprefix(prefix)
        return name


NESTED: Mapping[str, NestedForm] = {
    "Qwen2VLForConditionalGeneration": NestedForm(_QWEN, "Qwen2ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": NestedForm(_QWEN, "Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": NestedForm(_QWEN, "Qwen3ForCausalLM"),
    "Qwen3VLMoeForConditionalGeneration": NestedForm(
        _QWEN, "Qwen3MoeForCausalLM", values={"norm_topk_prob": True}, may_turn_stacks=True
    ),
    "Qwen3_5ForConditionalGeneration": NestedForm(_QWEN, "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": NestedForm(_QWEN, "Qwen3_5MoeForCausalLM"),
    "Step3VLForConditionalGeneration": NestedForm(_STEP, "Step3TextForCausalLM"),
    "Step3p7ForConditionalGeneration": NestedForm(_STEP, "Step3p7ForCausalLM"),
}
"""Class in config.json -> where its text model is."""


@dataclass(frozen=True)
class TextModel:
    """A text model by the `model_type` of its configuration.

    Attributes:
        architecture: its class in transformers.
        defaults: sizes that its configuration may leave out, as transformers' class has them.
    """

    architecture: str
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])


TEXT_MODELS: Mapping[str, TextModel] = {}
"""For checkpoints whose class does not determine the text model."""
