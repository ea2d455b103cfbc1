"""Checks that pages leave a CUDA device and come back: from the memory of the host, and from a
prefill server to a decode server on the same device. A part of `benchmarks.cuda_check`.
"""

import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import banyan
from benchmarks.cuda_tokens import greedy, prompts_of, sampling, started, tiny_llama

PAGE, COUNT, WAIT_S = 64, 24, 60.0
COPIED_S = 0.5
"""Pages go to the host beside the answers; so long is more than enough."""


def check_pages(device: str) -> int:
    """How many of the two checks fail."""
    model = tiny_llama()
    prompts = prompts_of([299, 300, 301, 302])  # the tier looks for 256 tokens or more
    wanted = [greedy(model, prompt, COUNT) for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        checks = (_from_the_host, _from_another_server)
        return sum(not check(folder, device, prompts, wanted) for check in checks)


def _from_the_host(
    folder: str, device: str, prompts: list[list[int]], wanted: list[list[int]]
) -> bool:
    """With room for eight pages here, the others take the place of the first prompt's."""
    found, places = [], []
    tier = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,  # room for all of them there
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    with started(folder, device, page_size=PAGE, max_total_tokens=8 * PAGE, **tier) as engine:
        for prompt in (*prompts, *prompts):
            answer = engine.generate(input_ids=prompt, sampling_params=sampling(COUNT))
            found.append(answer["output_ids"])
            places.append(answer["meta_info"].get("cached_tokens_details", {}).get("host", 0))
            time.sleep(COPIED_S)
    same = sum(a == b for a, b in zip(found, 2 * wanted, strict=True))
    on_host = device == "cpu"  # its cache lies there already, and there is no tier
    whole = [0 if on_host else len(prompt) // PAGE * PAGE for prompt in prompts]
    print(f"tokens equal transformers: {same}/8  tokens from the host's tier: {places}")
    return same == 8 and places[4:] == whole


def _from_another_server(
    folder: str, device: str, prompts: list[list[int]], wanted: list[list[int]]
) -> bool:
    """Each server is a process of its own, and the device belongs to both."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    flags = {"engine_mode": "normal", "page_size": PAGE, "max_total_tokens": 4096}
    giving = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port}
    place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
    found = []
    with (
        started(folder, device, **flags, **giving) as prefill,
        started(folder, device, **flags, disaggregation_mode="decode") as decode,
        ThreadPoolExecutor(2) as pool,
    ):
        for room, prompt in enumerate(prompts, 1000):
            asked = {"input_ids": prompt, "sampling_params": sampling(COUNT)}
            sides = [
                pool.submit(side.generate, **asked, **place, bootstrap_room=room)
                for side in (prefill, decode)
            ]
            found.append(sides[1].result(WAIT_S)["output_ids"])
            sides[0].result(WAIT_S)
        computed = [_computed(engine) for engine in (prefill, decode)]
    same = sum(a == b for a, b in zip(found, wanted, strict=True))
    most = sum(len(prompt) % PAGE + PAGE + COUNT for prompt in prompts)
    print(f"tokens equal transformers: {same}/4  prefill and decode computed {computed} tokens")
    return same == 4 and computed[1] <= most


def _computed(engine: banyan.Engine) -> int:
    (state,) = engine.get_server_info()["internal_states"]
    return state["stats"]["computed_tokens"]
