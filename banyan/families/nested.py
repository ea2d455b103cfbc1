"""Multimodal checkpoints: the part of them that is a text model of another family, and the names of
their towers' weights.

Without a tower here, only the text model is served, and weights of towers (vision, sound) and of
their projectors are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from banyan.families.names import QK, NameMap

_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
}
"""Names of Qwen3-VL and GLM-V; of Gemma 3, LLaVA and most others; of SmolVLM."""
_OLDER = {
    "vision_tower.vision_model.": "vision_tower.",
    "visual.vision_model.": "visual.",
    "visual.merger.mlp.0.": "visual.merger.linear_fc1.",
    "visual.merger.mlp.2.": "visual.merger.linear_fc2.",
}
"""Beginnings of towers' names in checkpoints of older versions -> in newer ones."""
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
        sound: the same of the sound tower.
        parts: parts of names of weights that a tower has although they are in the text model.
    """

    towers: tuple[str, ...]
    text: str = ""
    key: str = "text_config"
    prefixes: Mapping[str, str] = field(default_factory=lambda: _TEXT_PREFIXES)
    values: Mapping[str, object] = field(default_factory=dict[str, object])
    may_turn_stacks: bool = False
    tower: NameMap | None = None
    sound: NameMap | None = None
    parts: tuple[str, ...] = ()

    def text_name(self, name: str) -> str | None:
        """The name that a weight has in a checkpoint of the text model; None = it is left out."""
        if self.tower_name(name) is not None:
            return None
        for prefix, its in self.prefixes.items():
            if name.startswith(prefix):
                return its + name.removeprefix(prefix)
        return name

    def tower_name(self, name: str) -> str | None:
        """The name of a tower's weight as newer versions of transformers spell it, without "model."
        in front; None = it is of the text."""
        name = name.removeprefix("model.")
        if not name.startswith(self.towers) and not any(part in name for part in self.parts):
            return None
        for older, newer in _OLDER.items():
            if name.startswith(older):
                return newer + name.removeprefix(older)
        return name


_QWEN_TOWER = NameMap(
    {
        "visual.patch_embed.proj": "patches",
        "visual.pos_embed": "positions",
        "visual.blocks.{}.norm1": "layers.{}.attention_norm",
        "visual.blocks.{}.norm2": "layers.{}.mlp_norm",
        "visual.blocks.{}.attn.qkv": "layers.{}.attention.qkv:q+k+v",
        "visual.blocks.{}.attn.proj": "layers.{}.attention.out",
        "visual.blocks.{}.mlp.fc1": "layers.{}.mlp.up",
        "visual.blocks.{}.mlp.fc2": "layers.{}.mlp.down",
        "visual.blocks.{}.mlp.linear_fc1": "layers.{}.mlp.up",
        "visual.blocks.{}.mlp.linear_fc2": "layers.{}.mlp.down",
        "visual.blocks.{}.mlp.gate_proj": "layers.{}.mlp.gate_up:gate",
        "visual.blocks.{}.mlp.up_proj": "layers.{}.mlp.gate_up:up",
        "visual.blocks.{}.mlp.down_proj": "layers.{}.mlp.down",
        "visual.merger.norm": "merger.norm",
        "visual.merger.ln_q": "merger.norm",
        "visual.merger.linear_fc1": "merger.mlp.linear_1",
        "visual.merger.linear_fc2": "merger.mlp.linear_2",
        "visual.deepstack_merger_list.{}.norm": "deep.{}.norm",
        "visual.deepstack_merger_list.{}.linear_fc1": "deep.{}.mlp.linear_1",
        "visual.deepstack_merger_list.{}.linear_fc2": "deep.{}.mlp.linear_2",
    }
)

_GLM4V_TOWER = replace(
    _QWEN_TOWER,
    modules={
        **_QWEN_TOWER.modules,
        "visual.post_conv_layernorm": "first_norm",
        "visual.embeddings.position_embedding": "positions",
        "visual.post_layernorm": "last_norm",
        "visual.downsample": "merger.reduce",
        "visual.merger.proj": "merger.linear",
        "visual.merger.post_projection_norm": "merger.norm",
        "visual.merger.gate_proj": "merger.mlp.gate_up:gate",
        "visual.merger.up_proj": "merger.mlp.gate_up:up",
        "visual.merger.down_proj": "merger.mlp.down",
    },
)


def _siglip(prefix: str, more: Mapping[str, str], **rest: Any) -> NameMap:
    """Names of SigLIP and CLIP; the last norm is ignored if the features come from before it."""
    block, mine = f"{prefix}encoder.layers.{{}}.", "layers.{}."
    return NameMap(
        {
            f"{prefix}embeddings.patch_embedding": "patches",
            f"{prefix}embeddings.position_embedding": "positions",
            f"{prefix}embeddings.class_embedding": "class_token.weight",
            f"{prefix}pre_layrnorm": "first_norm",
            f"{prefix}post_layernorm": "last_norm",
            f"{block}layer_norm1": f"{mine}attention_norm",
            f"{block}layer_norm2": f"{mine}mlp_norm",
            f"{block}self_attn.q_proj": f"{mine}attention.qkv:q",
            f"{block}self_attn.k_proj": f"{mine}attention.qkv:k",
            f"{block}self_attn.v_proj": f"{mine}attention.qkv:v",
            f"{block}self_attn.out_proj": f"{mine}attention.out",
            f"{block}mlp.fc1": f"{mine}mlp.up",
            f"{block}mlp.fc2": f"{mine}mlp.down",
            **more,
        },
        ignored=(f"{prefix}post_layernorm.weight", f"{prefix}post_layernorm.bias"),
        unread=(
            f"{prefix}head.",
            f"{prefix}embeddings.position_ids",
            f"{prefix}embeddings.packing_position_embedding.",
        ),
        **rest,
    )


_PADDLEOCR_TOWER = _siglip(
    "visual.",
    {
        "mlp_AR.pre_norm": "merger.norm",
        "mlp_AR.linear_1": "merger.mlp.linear_1",
        "mlp_AR.linear_2": "merger.mlp.linear_2",
    },
)
_LLAMA4_BLOCK = "vision_model.model.layers.{}."
_LLAMA4_TOWER = NameMap(
    {
        "vision_model.patch_embedding.linear": "patches",
        "vision_model.class_embedding": "class_token.weight",
        "vision_model.positional_embedding_vlm": "positions.weight",
        "vision_model.layernorm_pre": "first_norm",
        "vision_model.layernorm_post": "last_norm",
        f"{_LLAMA4_BLOCK}input_layernorm": "layers.{}.attention_norm",
        f"{_LLAMA4_BLOCK}post_attention_layernorm": "layers.{}.mlp_norm",
        f"{_LLAMA4_BLOCK}self_attn.q_proj": "layers.{}.attention.qkv:q",
        f"{_LLAMA4_BLOCK}self_attn.k_proj": "layers.{}.attention.qkv:k",
        f"{_LLAMA4_BLOCK}self_attn.v_proj": "layers.{}.attention.qkv:v",
        f"{_LLAMA4_BLOCK}self_attn.o_proj": "layers.{}.attention.out",
        f"{_LLAMA4_BLOCK}mlp.fc1": "layers.{}.mlp.up",
        f"{_LLAMA4_BLOCK}mlp.fc2": "layers.{}.mlp.down",
        "vision_model.vision_adapter.mlp.fc1": "merger.mlp.linear_1",
        "vision_model.vision_adapter.mlp.fc2": "merger.mlp.linear_2",
        "multi_modal_projector.linear_1": "merger.linear",
    },
    paired=QK,
)
_PROJECTOR = {
    "multi_modal_projector.linear_1": "merger.mlp.linear_1",
    "multi_modal_projector.linear_2": "merger.mlp.linear_2",
}
_PIXTRAL_BLOCK = "vision_tower.transformer.layers.{}."
_PIXTRAL = {
    "vision_tower.patch_conv": "patches",
    "vision_tower.ln_pre": "first_norm",
    f"{_PIXTRAL_BLOCK}attention_norm": "layers.{}.attention_norm",
    f"{_PIXTRAL_BLOCK}ffn_norm": "layers.{}.mlp_norm",
    f"{_PIXTRAL_BLOCK}attention.q_proj": "layers.{}.attention.qkv:q",
    f"{_PIXTRAL_BLOCK}attention.k_proj": "layers.{}.attention.qkv:k",
    f"{_PIXTRAL_BLOCK}attention.v_proj": "layers.{}.attention.qkv:v",
    f"{_PIXTRAL_BLOCK}attention.o_proj": "layers.{}.attention.out",
    f"{_PIXTRAL_BLOCK}feed_forward.gate_proj": "layers.{}.mlp.gate_up:gate",
    f"{_PIXTRAL_BLOCK}feed_forward.up_proj": "layers.{}.mlp.gate_up:up",
    f"{_PIXTRAL_BLOCK}feed_forward.down_proj": "layers.{}.mlp.down",
}
_MISTRAL3_TOWER = NameMap(
    {
        **_PIXTRAL,
        **_PROJECTOR,
        "multi_modal_projector.norm": "merger.norm",
        "multi_modal_projector.patch_merger.merging_layer": "merger.reduce",
    }
)
_LLAVA_TOWER = _siglip("vision_tower.", {**_PIXTRAL, **_PROJECTOR})
_LLAVA_NEXT_TOWER = _siglip("vision_tower.", {**_PROJECTOR, "image_newline": "newline.weight"})
_GEMMA3_TOWER = _siglip(
    "vision_tower.",
    {
        "multi_modal_projector.mm_input_projection_weight": "merger.linear.weight",
        "multi_modal_projector.mm_soft_emb_norm": "merger.norm",
    },
    norm_offset=1.0,
    is_rms_offset=True,
)
_IDEFICS3_TOWER = _siglip("vision_model.", {"connector.modality_projection.proj": "merger.linear"})
_INTERNVL_BLOCK = "vision_tower.encoder.layer.{}."
_INTERNVL_TOWER = NameMap(
    {
        **_PROJECTOR,
        "multi_modal_projector.layer_norm": "merger.norm",
        "vision_tower.embeddings.patch_embeddings.projection": "patches",
        "vision_tower.embeddings.position_embeddings": "positions.weight",
        "vision_tower.embeddings.cls_token": "class_token.weight",
        "vision_tower.layernorm": "last_norm",
        f"{_INTERNVL_BLOCK}layernorm_before": "layers.{}.attention_norm",
        f"{_INTERNVL_BLOCK}layernorm_after": "layers.{}.mlp_norm",
        f"{_INTERNVL_BLOCK}attention.q_proj": "layers.{}.attention.qkv:q",
        f"{_INTERNVL_BLOCK}attention.k_proj": "layers.{}.attention.qkv:k",
        f"{_INTERNVL_BLOCK}attention.v_proj": "layers.{}.attention.qkv:v",
        f"{_INTERNVL_BLOCK}attention.q_norm": "layers.{}.attention.q_norm",
        f"{_INTERNVL_BLOCK}attention.k_norm": "layers.{}.attention.k_norm",
        f"{_INTERNVL_BLOCK}attention.projection_layer": "layers.{}.attention.out",
        f"{_INTERNVL_BLOCK}mlp.fc1": "layers.{}.mlp.up",
        f"{_INTERNVL_BLOCK}mlp.fc2": "layers.{}.mlp.down",
        f"{_INTERNVL_BLOCK}lambda_1": "layers.{}.attention_scale.weight",
        f"{_INTERNVL_BLOCK}lambda_2": "layers.{}.mlp_scale.weight",
    }
)

_SOUND_BLOCK = "audio_tower.layers.{}."
_SOUND_TOWER = NameMap(
    {
        **_PROJECTOR,
        "multi_modal_projector.linear": "merger.linear",
        "audio_tower.conv1": "conv_1",
        "audio_tower.conv2": "conv_2",
        "audio_tower.embed_positions": "positions",
        "audio_tower.layer_norm": "last_norm",
        f"{_SOUND_BLOCK}self_attn_layer_norm": "layers.{}.attention_norm",
        f"{_SOUND_BLOCK}final_layer_norm": "layers.{}.mlp_norm",
        f"{_SOUND_BLOCK}self_attn.q_proj": "layers.{}.attention.q",
        f"{_SOUND_BLOCK}self_attn.k_proj": "layers.{}.attention.k",
        f"{_SOUND_BLOCK}self_attn.v_proj": "layers.{}.attention.v",
        f"{_SOUND_BLOCK}self_attn.out_proj": "layers.{}.attention.out",
        f"{_SOUND_BLOCK}fc1": "layers.{}.mlp.up",
        f"{_SOUND_BLOCK}fc2": "layers.{}.mlp.down",
    }
)
_WHISPER_TOWER = NameMap(
    {
        **{
            name.replace("audio_tower.", "encoder."): place
            for name, place in _SOUND_TOWER.modules.items()
            if name.startswith("audio_tower.")
        },
        "decoder.layers.{}.encoder_attn.k_proj": "merger.k.{}",
        "decoder.layers.{}.encoder_attn.v_proj": "merger.v.{}",
    }
)

NESTED: Mapping[str, NestedForm] = {
    "Qwen2VLForConditionalGeneration": NestedForm(_VISUAL, "Qwen2ForCausalLM", tower=_QWEN_TOWER),
    "Qwen2_5_VLForConditionalGeneration": NestedForm(
        _VISUAL, "Qwen2ForCausalLM", tower=_QWEN_TOWER
    ),
    "Qwen3VLForConditionalGeneration": NestedForm(_VISUAL, "Qwen3ForCausalLM", tower=_QWEN_TOWER),
    "Qwen3VLMoeForConditionalGeneration": NestedForm(
        _VISUAL,
        "Qwen3MoeForCausalLM",
        values={"norm_topk_prob": True},
        may_turn_stacks=True,
        tower=_QWEN_TOWER,
    ),
    "Qwen3_5ForConditionalGeneration": NestedForm(_VISUAL, "Qwen3_5ForCausalLM", tower=_QWEN_TOWER),
    "Qwen3_5MoeForConditionalGeneration": NestedForm(
        _VISUAL, "Qwen3_5MoeForCausalLM", tower=_QWEN_TOWER
    ),
    "Gemma3ForConditionalGeneration": NestedForm(_TOWER, "Gemma3ForCausalLM", tower=_GEMMA3_TOWER),
    "Mistral3ForConditionalGeneration": NestedForm(_TOWER, tower=_MISTRAL3_TOWER),
    "LlavaForConditionalGeneration": NestedForm(_LLAVA, tower=_LLAVA_TOWER),
    "LlavaNextForConditionalGeneration": NestedForm(_LLAVA, tower=_LLAVA_NEXT_TOWER),
    "LlavaOnevisionForConditionalGeneration": NestedForm(_LLAVA),
    "VipLlavaForConditionalGeneration": NestedForm(_LLAVA),
    "AyaVisionForConditionalGeneration": NestedForm(_TOWER, "Cohere2ForCausalLM"),
    "Cohere2VisionForConditionalGeneration": NestedForm(_TOWER, "Cohere2ForCausalLM"),
    "Lfm2VlForConditionalGeneration": NestedForm(_TOWER, "Lfm2ForCausalLM"),
    "GotOcr2ForConditionalGeneration": NestedForm(_TOWER, "Qwen2ForCausalLM"),
    "LightOnOcrForConditionalGeneration": NestedForm(
        ("vision_encoder.", "vision_projection."), "Qwen3ForCausalLM"
    ),
    "Qwen2AudioForConditionalGeneration": NestedForm(
        _SOUND, "Qwen2ForCausalLM", sound=_SOUND_TOWER
    ),
    "VoxtralForConditionalGeneration": NestedForm(_SOUND, "LlamaForCausalLM", sound=_SOUND_TOWER),
    "WhisperForConditionalGeneration": NestedForm(
        ("encoder.",),
        "WhisperForCausalLM",
        prefixes={},
        sound=_WHISPER_TOWER,
        parts=(".encoder_attn.k_proj.", ".encoder_attn.v_proj."),
    ),
    "InternVLForConditionalGeneration": NestedForm(_TOWER, tower=_INTERNVL_TOWER),
    "InternVLChatModel": NestedForm(("vision_model.", "mlp1."), key="llm_config"),
    "SmolVLMForConditionalGeneration": NestedForm(_IDEFICS, tower=_IDEFICS3_TOWER),
    "Idefics3ForConditionalGeneration": NestedForm(_IDEFICS, tower=_IDEFICS3_TOWER),
    "Llama4ForConditionalGeneration": NestedForm(
        ("vision_model.", "multi_modal_projector."), "Llama4ForCausalLM", tower=_LLAMA4_TOWER
    ),
    "PaddleOCRVLForConditionalGeneration": NestedForm(
        ("visual.", "mlp_AR."), "LlamaForCausalLM", tower=_PADDLEOCR_TOWER
    ),
    "Glm4vForConditionalGeneration": NestedForm(_VISUAL, "Glm4ForCausalLM", tower=_GLM4V_TOWER),
    "Glm46VForConditionalGeneration": NestedForm(_VISUAL, "Glm4ForCausalLM", tower=_GLM4V_TOWER),
    "Glm4vMoeForConditionalGeneration": NestedForm(
        _VISUAL, "Glm4MoeForCausalLM", tower=_GLM4V_TOWER
    ),
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
