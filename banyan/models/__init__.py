"""Model families by Hugging Face class name."""

from banyan.base.table import Table
from banyan.models.spec import ArchSpec

ARCHITECTURES: Table[ArchSpec] = Table(
    "model architecture",
    {
        "LlamaForCausalLM": "banyan.models.llama:LLAMA",
        "MistralForCausalLM": "banyan.models.llama:LLAMA",
        "Qwen2ForCausalLM": "banyan.models.qwen:QWEN2",
        "Qwen3ForCausalLM": "banyan.models.qwen:QWEN3",
        "Gemma2ForCausalLM": "banyan.models.gemma:GEMMA2",
        "Gemma3ForCausalLM": "banyan.models.gemma:GEMMA3",
        "Phi3ForCausalLM": "banyan.models.phi:PHI3",
        "Olmo2ForCausalLM": "banyan.models.olmo:OLMO2",
        "GraniteForCausalLM": "banyan.models.granite:GRANITE",
        "Glm4ForCausalLM": "banyan.models.glm:GLM4",
        "Starcoder2ForCausalLM": "banyan.models.starcoder:STARCODER2",
        "Cohere2ForCausalLM": "banyan.models.cohere:COHERE2",
        "MixtralForCausalLM": "banyan.models.mixtral:MIXTRAL",
        "OlmoeForCausalLM": "banyan.models.olmo:OLMOE",
        "Qwen2MoeForCausalLM": "banyan.models.qwen:QWEN2_MOE",
        "Qwen3MoeForCausalLM": "banyan.models.qwen:QWEN3_MOE",
        "DeepseekV2ForCausalLM": "banyan.models.deepseek:DEEPSEEK",
        "DeepseekV3ForCausalLM": "banyan.models.deepseek:DEEPSEEK",
        "LlamaModel": "banyan.models.llama:LLAMA",
        "MistralModel": "banyan.models.llama:LLAMA",
        "Qwen2Model": "banyan.models.qwen:QWEN2",
        "Qwen3Model": "banyan.models.qwen:QWEN3",
        "LlamaForSequenceClassification": "banyan.models.llama:LLAMA",
        "MistralForSequenceClassification": "banyan.models.llama:LLAMA",
        "Qwen2ForSequenceClassification": "banyan.models.qwen:QWEN2",
        "Qwen3ForSequenceClassification": "banyan.models.qwen:QWEN3",
        "BertModel": "banyan.models.bert:BERT",
        "BertForSequenceClassification": "banyan.models.bert:BERT",
        "RobertaModel": "banyan.models.bert:ROBERTA",
        "RobertaForSequenceClassification": "banyan.models.bert:ROBERTA",
        "XLMRobertaModel": "banyan.models.bert:ROBERTA",
        "XLMRobertaForSequenceClassification": "banyan.models.bert:ROBERTA",
    },
    plugins="banyan.architectures",
)
