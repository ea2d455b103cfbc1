"""Multimodal checkpoints: the part of them that is a text model of another family, and the names of
their towers' weights.

Without a tower here, only the text model is served, and weights of towers (vision, sound) and of
their projectors are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from banyan.families.names import NameMap

_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
}
"""Names of Qwen3-VL and GLM-V; of Gemma 3, LLaVA and most others; of SmolVLM."""
_VISUAL = ("visual.",)
_TOWER = ("vision_tower.", "multi_modal_projector.")
_LLAVA = (*_TOWER, "image_newline")
_SOUND = ("audio_tower.", "multi_modal_projector.")
_IDEFICS = ("vision_model.", "connector.")
_KIMI = ("vision_tower.", "mm_projector.")
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
        tower: names of the tower's weights, without "model." in front.
    """

    towers: tuple[str, ...]
    text: str = ""
    key: str = "text_config"
    prefixes: Mapping[str, str] = field(default_factory=lambda: _TEXT_PREFIXES)
    values: Mapping[str, object] = field(default_factory=dict[str, object])
    may_turn_stacks: bool = False
    tower: NameMap | None = None

    def text_name(self, name: str) -> str | None:
        """The name that a weight has in a checkpoint of the text model; None = it is left out."""
        if self.tower_name(name) is not None:
            return None
        for prefix, its in self.prefixes.items():
            if name.startswith(prefix):
                return its + name.removeprefix(prefix)
        return name

    def tower_name(self, name: str) -> str | None:
        """The name of a tower's weight without "model." in front; None = it is of the text."""
        name = name.removeprefix("model.")
        return name if name.startswith(self.towers) else None


_QWEN_BLOCKS = {
    "visual.patch_embed.proj": "patches",
    "visual.blocks.{}.norm1": "layers.{}.attention_norm",
    "visual.blocks.{}.norm2": "layers.{}.mlp_norm",
    "visual.blocks.{}.attn.qkv": "layers.{}.attention.qkv:q+k+v",
    "visual.blocks.{}.attn.proj": "layers.{}.attention.out",
}
_QWEN2_TOWER = NameMap(
    {
        **_QWEN_BLOCKS,
        "visual.blocks.{}.mlp.fc1": "layers.{}.mlp.up",
        "visual.blocks.{}.mlp.fc2": "layers.{}.mlp.down",
        "visual.blocks.{}.mlp.gate_proj": "layers.{}.mlp.gate_up:gate",
        "visual.blocks.{}.mlp.up_proj": "layers.{}.mlp.gate_up:up",
        "visual.blocks.{}.mlp.down_proj": "layers.{}.mlp.down",
        "visual.merger.ln_q": "merger.norm",
        "visual.merger.mlp.{}": "merger.linear_{}",
    }
)
_QWEN3_TOWER = NameMap(
    {
        **_QWEN_BLOCKS,
        "visual.pos_embed": "positions",
        "visual.blocks.{}.mlp.linear_fc1": "layers.{}.mlp.up",
        "visual.blocks.{}.mlp.linear_fc2": "layers.{}.mlp.down",
        "visual.merger.norm": "merger.norm",
        "visual.merger.linear_fc1": "merger.linear_0",
        "visual.merger.linear_fc2": "merger.linear_2",
        "visual.deepstack_merger_list.{}.norm": "deep.{}.norm",
        "visual.deepstack_merger_list.{}.linear_fc1": "deep.{}.linear_0",
        "visual.deepstack_merger_list.{}.linear_fc2": "deep.{}.linear_2",
    }
)
"""Projections of mergers are numbered as in Qwen2-VL: 1 is the activation between them."""


NESTED: Mapping[str, NestedForm] = {
    "Qwen2VLForConditionalGeneration": NestedForm(_VISUAL, "Qwen2ForCausalLM", tower=_QWEN2_TOWER),
    "Qwen2_5_VLForConditionalGeneration": NestedForm(
        _VISUAL, "Qwen2ForCausalLM", tower=_QWEN2_TOWER
    ),
    "Qwen3VLForConditionalGeneration": NestedForm(_VISUAL, "Qwen3ForCausalLM", tower=_QWEN3_TOWER),
    "Qwen3VLMoeForConditionalGeneration": NestedForm(
        _VISUAL,
        "Qwen3MoeForCausalLM",
        values={"norm_topk_prob": True},
        may_turn_stacks=True,
        tower=_QWEN3_TOWER,
    ),
    "Qwen3_5ForConditionalGeneration": NestedForm(
        _VISUAL, "Qwen3_5ForCausalLM", tower=_QWEN3_TOWER
    ),
    "Qwen3_5MoeForConditionalGeneration": NestedForm(
        _VISUAL, "Qwen3_5MoeForCausalLM", tower=_QWEN3_TOWER
    ),
    "Gemma3ForConditionalGeneration": NestedForm(_TOWER, "Gemma3ForCausalLM"),
    "Mistral3ForConditionalGeneration": NestedForm(_TOWER),
    "LlavaForConditionalGeneration": NestedForm(_LLAVA),
    "LlavaNextForConditionalGeneration": NestedForm(_LLAVA),
    "LlavaOnevisionForConditionalGeneration": NestedForm(_LLAVA),
    "VipLlavaForConditionalGeneration": NestedForm(_LLAVA),
    "AyaVisionForConditionalGeneration": NestedForm(_TOWER, "Cohere2ForCausalLM"),
    "Cohere2VisionForConditionalGeneration": NestedForm(_TOWER, "Cohere2ForCausalLM"),
    "Lfm2VlForConditionalGeneration": NestedForm(_TOWER, "Lfm2ForCausalLM"),
    "GotOcr2ForConditionalGeneration": NestedForm(_TOWER, "Qwen2ForCausalLM"),
    "LightOnOcrForConditionalGeneration": NestedForm(
        ("vision_encoder.", "vision_projection."), "Qwen3ForCausalLM"
    ),
    "Qwen2AudioForConditionalGeneration": NestedForm(_SOUND, "Qwen2ForCausalLM"),
    "VoxtralForConditionalGeneration": NestedForm(_SOUND, "LlamaForCausalLM"),
    "InternVLForConditionalGeneration": NestedForm(_TOWER),
    "InternVLChatModel": NestedForm(("vision_model.", "mlp1."), key="llm_config"),
    "SmolVLMForConditionalGeneration": NestedForm(_IDEFICS),
    "Idefics3ForConditionalGeneration": NestedForm(_IDEFICS),
    "Llama4ForConditionalGeneration": NestedForm(
        ("vision_model.", "multi_modal_projector."), "Llama4ForCausalLM"
    ),
    "Glm4vForConditionalGeneration": NestedForm(_VISUAL, "Glm4ForCausalLM"),
    "Glm46VForConditionalGeneration": NestedForm(_VISUAL, "Glm4ForCausalLM"),
    "Glm4vMoeForConditionalGeneration": NestedForm(_VISUAL, "Glm4MoeForCausalLM"),
    "KimiVLForConditionalGeneration": NestedForm(_TOWER, "DeepseekV3ForCausalLM"),
    "KimiK25ForConditionalGeneration": NestedForm(_KIMI, "DeepseekV3ForCausalLM"),
    "Kimi_K25ForConditionalGeneration": NestedForm(_KIMI, "DeepseekV3ForCausalLM"),
    "Step3VLForConditionalGeneration": NestedForm(_STEP, "Step3TextForCausalLM"),
    "Step3p7ForConditionalGeneration": NestedForm(_STEP, "Step3p7ForCausalLM"),
}
"""Class in config.json -> where its text model is."""


@dataclass(frozen=True)
class TextModel:
    """A text model by the `model_type` of its configuration.

    Attributes:
        architecture: its class in transformers.
        defaults: fields that its configuration may leave out, as transformers' class has them.
    """

    architecture: str
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])


_LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL_7B = _LLAMA_7B | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_MINISTRAL3 = _MISTRAL_7B | {
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "max_position_embeddings": 262144,
}
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
TEXT_MODELS: Mapping[str, TextModel] = {
    "llama": TextModel("LlamaForCausalLM", _LLAMA_7B),
    "mistral": TextModel("MistralForCausalLM", _MISTRAL_7B),
    "ministral3": TextModel("Ministral3ForCausalLM", _MINISTRAL3),
    "gemma3_text": TextModel("Gemma3ForCausalLM", _GEMMA3),
    "glm4v_text": TextModel(
        "Glm4ForCausalLM", {"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5}
    ),
    "mixtral": TextModel("MixtralForCausalLM"),
    "qwen2": TextModel("Qwen2ForCausalLM"),
    "qwen3": TextModel("Qwen3ForCausalLM"),
    "qwen3_moe": TextModel("Qwen3MoeForCausalLM"),
    "gpt_oss": TextModel("GptOssForCausalLM"),
    "gemma2": TextModel("Gemma2ForCausalLM"),
    "phi3": TextModel("Phi3ForCausalLM"),
    "granite": TextModel("GraniteForCausalLM"),
    "cohere2": TextModel("Cohere2ForCausalLM"),
    "lfm2": TextModel("Lfm2ForCausalLM"),
    "ernie4_5": TextModel("Ernie4_5ForCausalLM"),
    "deepseek_v3": TextModel("DeepseekV3ForCausalLM"),
}
"""By `model_type` of the text part, for classes that take several text models."""
