"""Model families by Hugging Face class name; as "gguf/…" by the architecture of a GGUF file."""

from banyan.base.table import Table
from banyan.families.base import Family

GGUF = "gguf/"

FAMILIES: Table[Family] = Table(
    "model architecture",
    {
        "LlamaForCausalLM": "banyan.families.llama:LLAMA",
        "MistralForCausalLM": "banyan.families.llama:LLAMA",
        "Qwen2ForCausalLM": "banyan.families.qwen:QWEN2",
        "Qwen3ForCausalLM": "banyan.families.qwen:QWEN3",
        "Gemma2ForCausalLM": "banyan.families.gemma:GEMMA2",
        "Gemma3ForCausalLM": "banyan.families.gemma:GEMMA3",
        "Phi3ForCausalLM": "banyan.families.phi:PHI3",
        "Olmo2ForCausalLM": "banyan.families.olmo:OLMO2",
        "GraniteForCausalLM": "banyan.families.granite:GRANITE",
        "Glm4ForCausalLM": "banyan.families.glm:GLM4",
        "Starcoder2ForCausalLM": "banyan.families.starcoder:STARCODER2",
        "Cohere2ForCausalLM": "banyan.families.cohere:COHERE2",
        "MixtralForCausalLM": "banyan.families.mixtral:MIXTRAL",
        "OlmoeForCausalLM": "banyan.families.olmo:OLMOE",
        "Qwen2MoeForCausalLM": "banyan.families.qwen:QWEN2_MOE",
        "Qwen3MoeForCausalLM": "banyan.families.qwen:QWEN3_MOE",
        "DeepseekV2ForCausalLM": "banyan.families.deepseek:DEEPSEEK_V2",
        "DeepseekV3ForCausalLM": "banyan.families.deepseek:DEEPSEEK_V3",
        "DeepseekV32ForCausalLM": "banyan.families.deepseek:DEEPSEEK_V32",
        "GlmMoeDsaForCausalLM": "banyan.families.deepseek:GLM_MOE_DSA",
        "Glm4MoeForCausalLM": "banyan.families.glm:GLM4_MOE",
        "Dots1ForCausalLM": "banyan.families.dots:DOTS1",
        "Ernie4_5ForCausalLM": "banyan.families.ernie:ERNIE45",
        "Ernie4_5_MoeForCausalLM": "banyan.families.ernie:ERNIE45_MOE",
        "GraniteMoeForCausalLM": "banyan.families.granite:GRANITE_MOE",
        "HunYuanDenseV1ForCausalLM": "banyan.families.hunyuan:HUNYUAN",
        "HunYuanMoEV1ForCausalLM": "banyan.families.hunyuan:HUNYUAN_MOE",
        "GptOssForCausalLM": "banyan.families.gpt_oss:GPT_OSS",
        "PhiMoEForCausalLM": "banyan.families.phi:PHI_MOE",
        "PhimoeForCausalLM": "banyan.families.phi:PHI_MOE",
        "BailingMoeForCausalLM": "banyan.families.bailing:BAILING_MOE",
        "BailingMoeV2ForCausalLM": "banyan.families.bailing:BAILING_MOE_V2",
        "MiniMaxM2ForCausalLM": "banyan.families.minimax:MINIMAX_M2",
        "Mamba2ForCausalLM": "banyan.families.mamba:MAMBA2",
        "FalconH1ForCausalLM": "banyan.families.mamba:FALCON_H1",
        "NemotronHForCausalLM": "banyan.families.nemotron:NEMOTRON_H",
        "BambaForCausalLM": "banyan.families.mamba:BAMBA",
        "GraniteMoeHybridForCausalLM": "banyan.families.mamba:GRANITE_HYBRID",
        "Qwen3NextForCausalLM": "banyan.families.qwen_next:QWEN3_NEXT",
        "Lfm2ForCausalLM": "banyan.families.lfm:LFM2",
        "LlamaModel": "banyan.families.llama:LLAMA_BODY",
        "MistralModel": "banyan.families.llama:LLAMA_BODY",
        "Qwen2Model": "banyan.families.qwen:QWEN2_BODY",
        "Qwen3Model": "banyan.families.qwen:QWEN3_BODY",
        "LlamaForSequenceClassification": "banyan.families.llama:LLAMA_BODY",
        "MistralForSequenceClassification": "banyan.families.llama:LLAMA_BODY",
        "Qwen2ForSequenceClassification": "banyan.families.qwen:QWEN2_BODY",
        "Qwen3ForSequenceClassification": "banyan.families.qwen:QWEN3_BODY",
        "BertModel": "banyan.families.bert:BERT",
        "BertForSequenceClassification": "banyan.families.bert:BERT",
        "RobertaModel": "banyan.families.bert:ROBERTA",
        "RobertaForSequenceClassification": "banyan.families.bert:ROBERTA",
        "XLMRobertaModel": "banyan.families.bert:ROBERTA",
        "XLMRobertaForSequenceClassification": "banyan.families.bert:ROBERTA",
        "gguf/llama": "banyan.families.llama:LLAMA",
        "gguf/qwen2": "banyan.families.qwen:QWEN2",
        "gguf/qwen3": "banyan.families.qwen:QWEN3",
        "gguf/qwen2moe": "banyan.families.qwen:QWEN2_MOE",
        "gguf/qwen3moe": "banyan.families.qwen:QWEN3_MOE",
        "gguf/olmoe": "banyan.families.olmo:OLMOE",
        "gguf/deepseek2": "banyan.families.deepseek:DEEPSEEK_V2",
        "gguf/gpt-oss": "banyan.families.gpt_oss:GPT_OSS",
        "gguf/gemma2": "banyan.families.gemma:GEMMA2",
        "gguf/gemma3": "banyan.families.gemma:GEMMA3",
        "gguf/phi3": "banyan.families.phi:PHI3",
        "gguf/olmo2": "banyan.families.olmo:OLMO2",
        "gguf/granite": "banyan.families.granite:GRANITE",
        "gguf/glm4": "banyan.families.glm:GLM4",
        "gguf/glm4moe": "banyan.families.glm:GLM4_MOE",
        "gguf/dots1": "banyan.families.dots:DOTS1",
        "gguf/ernie4_5": "banyan.families.ernie:ERNIE45",
        "gguf/ernie4_5-moe": "banyan.families.ernie:ERNIE45_MOE",
        "gguf/granitemoe": "banyan.families.granite:GRANITE_MOE",
        "gguf/hunyuan-dense": "banyan.families.hunyuan:HUNYUAN",
        "gguf/hunyuan-moe": "banyan.families.hunyuan:HUNYUAN_MOE",
        "gguf/minimax-m2": "banyan.families.minimax:MINIMAX_M2",
        "gguf/bailingmoe": "banyan.families.bailing:BAILING_MOE",
        "gguf/bailingmoe2": "banyan.families.bailing:BAILING_MOE_V2",
        "gguf/starcoder2": "banyan.families.starcoder:STARCODER2",
        "gguf/cohere2": "banyan.families.cohere:COHERE2",
    },
    plugins="banyan.families",
)


def known_classes() -> list[str]:
    """Class names of the hub's form."""
    return [name for name in FAMILIES if not name.startswith(GGUF)]


def known_gguf() -> list[str]:
    """Architectures of GGUF files."""
    return [name.removeprefix(GGUF) for name in FAMILIES if name.startswith(GGUF)]
