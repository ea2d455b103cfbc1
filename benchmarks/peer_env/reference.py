"""The reference of fidelity: transformers in float32. Runs in the transformers peer's environment.

reference.py MODEL_FOLDER PROMPTS.json OUT.npz STEPS
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def main(folder: str, prompts: str, out: str, steps: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    contexts: list[list[int]] = []
    logprobs: list[np.ndarray] = []
    for prompt in json.loads(Path(prompts).read_text()):
        ids = list(prompt)
        for _ in range(steps):
            logits = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
            contexts.append(list(ids))
            logprobs.append(logits.log_softmax(-1).numpy())
            ids.append(int(logits.argmax()))
    np.savez(
        out,
        lengths=np.array([len(c) for c in contexts]),
        contexts=np.concatenate([np.array(c, dtype=np.int64) for c in contexts]),
        logprobs=np.stack(logprobs),
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
