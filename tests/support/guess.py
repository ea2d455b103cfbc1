"""The guess list: files that a reader of other engines finds by name alone.

python -m tests.support.guess     prints each thing with its file, and the misses
"""

from fnmatch import fnmatch
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "banyan"

GUESSES = {
    "chat completions route": "server/openai/chat*/route.py server/openai/chat_completions.py",
    "sampling parameters": "*/sampling_params.py",
    "tokenizer": "tokenizer/tokenizer.py",
    "detokenizer": "*/detokenizer.py",
    "chat template": "chat_template/*template*.py",
    "tool-call parser": "parsers/tool_calls/*.py parsers/tool_call*.py",
    "reasoning parser": "parsers/reasoning/*.py parsers/reasoning*.py",
    "engine client": "engine_client/client.py",
    "engine process main": "engine/core_process.py engine/*main*.py",
    "server start": "server/lifecycle/start*.py",
    "scheduler": "scheduler/scheduler.py",
    "request state": "scheduler/request.py",
    "radix cache": "*/radix_tree.py */radix_cache.py",
    "page pool": "*/page_pool.py",
    "hierarchical cache": "*/hierarchical_cache.py */hicache.py",
    "KV transfer": "kv_transfer/*.py",
    "prefill / decode disaggregation": "disaggregation/*.py",
    "LoRA pool": "lora/pool.py lora/lora_pool.py",
    "weight loader": "models/weights/loader.py",
    "weight update": "*/weight_update*.py */update_weights.py",
    "quantisation methods": "*/quant/*.py */quantization/*.py",
    "model config": "model_config/model_config.py",
    "llama": "*/llama.py",
    "mixture of experts": "moe/*.py",
    "MTP": "*/mtp.py",
    "drafters": "*/speculative/*draft*.py */speculative/eagle.py",
    "multi-step decode": "*/multi_step.py",
    "pipeline parallel": "pipeline/*.py",
    "DP attention": "dp_attention/*.py",
    "context parallel": "context_parallel/*.py",
    "collectives": "*/collectives.py",
    "paged attention (CPU kernel)": "ops/cpu/*paged_attention*",
    "grammar": "grammar/*.py",
    "authentication": "*/auth.py */authentication.py",
    "metrics": "*/metrics.py",
    "flag checks": "config/flag_*.py config/rules/*.py",
    "router policy": "router/polic*.py",
    "expert balancing": "moe/*balanc*.py */eplb*.py",
}
"""Thing -> the names under which a reader of SGLang or vLLM looks for its file."""


def found(patterns: str) -> list[str]:
    """The files of the package that have one of these names."""
    files = (p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*") if p.is_file())
    hits = [f for f in files if any(fnmatch(f, p) for p in patterns.split())]
    return sorted(f for f in hits if not f.endswith(("__init__.py", ".pyc")))


def misses() -> list[str]:
    return [thing for thing, patterns in GUESSES.items() if not found(patterns)]


if __name__ == "__main__":
    for thing, patterns in GUESSES.items():
        print(f"{thing:32} {next(iter(found(patterns)), 'MISS: ' + patterns)}")
    print(f"{len(GUESSES) - len(misses())} of {len(GUESSES)}")
