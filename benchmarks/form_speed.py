"""What a form of quantised checkpoints costs in decoding beside GGUF: `python -m
benchmarks.form_speed`.

Random weights of one shape as safetensors in each form, and as Q8_0 in a GGUF file. Rounds go
through all of them in turn, forwards and back, so that a busy machine is busy for each; what is
told is the median of the ratios within a round.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf

import banyan
from benchmarks import random_experts, random_floats

LAYERS, WIDTH, VOCAB, TOKENS = 8, random_experts.DIM, 512, 48
Decode = Callable[[], float]
Q8 = gguf.GGMLQuantizationType.Q8_0


def llama(path: str) -> None:
    """The shape that random_floats.write gives."""
    inner, heads = WIDTH * 11 // 4 // random_floats.BLOCK * random_floats.BLOCK, WIDTH // 64
    file = random_experts.RandomFile(path, "llama", LAYERS, VOCAB)
    file.writer.add_feed_forward_length(inner)
    file.writer.add_head_count(heads)
    file.writer.add_head_count_kv(heads)
    file.writer.add_rope_dimension_count(64)
    file.writer.add_vocab_size(VOCAB)
    for block in (f"blk.{layer}" for layer in range(LAYERS)):
        file.ones(f"{block}.attn_norm.weight", WIDTH)
        file.ones(f"{block}.ffn_norm.weight", WIDTH)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            file.quantised(f"{block}.{name}.weight", WIDTH, WIDTH, kind=Q8)
        file.quantised(f"{block}.ffn_gate.weight", inner, WIDTH, kind=Q8)
        file.quantised(f"{block}.ffn_up.weight", inner, WIDTH, kind=Q8)
        file.quantised(f"{block}.ffn_down.weight", WIDTH, inner, kind=Q8)
    file.close()


def tokens_per_s(engine: banyan.Engine, rows: int) -> float:
    """Of decoding alone: what a longer answer takes beyond a short one."""

    def seconds(tokens: int) -> float:
        asked = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        found = engine.generate(
            input_ids=[[5, 6, 7 + r] for r in range(rows)], sampling_params=asked
        )
        return max(one["meta_info"]["e2e_latency"] for one in found)

    return rows * (TOKENS - 1) / (seconds(TOKENS) - seconds(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=1, help="requests at a time")
    parser.add_argument("--forms", nargs="*", default=["fp8-block", "int8"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="banyan-forms-") as folder:
        paths = {"gguf": f"{folder}/q8_0.gguf"}
        llama(paths["gguf"])
        for form in options.forms:
            paths[form] = str(Path(folder, form))
            random_floats.write(form, paths[form], LAYERS, WIDTH, VOCAB)
        speeds: dict[str, list[float]] = {form: [] for form in paths}
        usual = {"skip_tokenizer_init": True, "log_level": "error", "max_total_tokens": 2048}
        engines = {form: banyan.Engine(model_path=path, **usual) for form, path in paths.items()}
        try:
            for number in range(options.rounds):
                for form in list(paths)[:: 1 if number % 2 else -1]:
                    speeds[form].append(tokens_per_s(engines[form], options.rows))
        finally:
            for engine in engines.values():
                engine.shutdown()
    print("| form | tokens/s | of Q8_0 in GGUF |\n|---|---|---|")
    for form, found in speeds.items():
        ratios = [mine / other for mine, other in zip(found, speeds["gguf"], strict=True)]
        print(f"| {form} | {statistics.median(found):.1f} | {statistics.median(ratios):.2f} |")


if __name__ == "__main__":
    main()
