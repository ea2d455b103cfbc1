"""OpenVINO GenAI as /v1/completions: its ContinuousBatchingPipeline, driven step by step.

openvino_server.py MODEL_FOLDER PORT [--cache-gb N]
openvino_server.py --convert MODEL.gguf     (writes the IR next to the file)
"""

import argparse
import itertools

import numpy as np
import openvino
import openvino_genai
from front import Inbox, Work, serve

_MAX_SEQUENCES = 64
_BATCHED_TOKENS = 2048


def convert(path: str) -> None:
    openvino_genai.LLMPipeline(path, "CPU", enable_save_ov_model=True)


class Engine:
    """The pipeline, its requests, and who waits for their tokens."""

    def __init__(self, folder: str, cache_gb: int, inbox: Inbox) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = cache_gb
        scheduler.max_num_batched_tokens = _BATCHED_TOKENS
        scheduler.max_num_seqs = _MAX_SEQUENCES
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", {})
        self.tokenizer = self._pipeline.get_tokenizer()
        self._inbox = inbox
        self._numbers = itertools.count()
        self._live: dict[int, tuple[openvino_genai.GenerationHandle, Work]] = {}

    def run(self) -> None:
        running = openvino_genai.GenerationStatus.RUNNING
        while True:
            for work in self._inbox.take(wait=not self._live):
                self._add(work)
            if self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            for number, (handle, work) in list(self._live.items()):
                ids: list[int] = []
                scores: list[dict[str, float]] = []
                while handle.can_read():
                    for output in handle.read().values():
                        ids += output.generated_ids
                        # Only the chosen token's log-probability is to be had.
                        pairs = zip(output.generated_ids, output.generated_log_probs, strict=False)
                        scores += [{f"token_id:{i}": lp} for i, lp in pairs]
                is_last = handle.get_status() != running
                if ids or is_last:
                    work.emit(ids, is_last, scores)
                if is_last:
                    del self._live[number]

    def _add(self, work: Work) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = work.max_tokens
        config.do_sample = False
        config.ignore_eos = work.ignore_eos
        config.apply_chat_template = False
        config.logprobs = 1 if work.top else 0
        number = next(self._numbers)
        ids = openvino.Tensor(np.array([work.ids], dtype=np.int64))
        self._live[number] = (self._pipeline.add_request(number, ids, config), work)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int, nargs="?", default=0)
    parser.add_argument("--cache-gb", type=int, default=2)
    parser.add_argument("--convert", action="store_true")
    options = parser.parse_args()
    if options.convert:
        convert(options.model)
        return
    inbox = Inbox()
    engine = Engine(options.model, options.cache_gb, inbox)
    tokenizer = engine.tokenizer
    serve(
        options.port,
        inbox,
        lambda text: tokenizer.encode(text).input_ids.data[0].tolist(),
        lambda ids: tokenizer.decode(ids),
        engine.run,
    )


if __name__ == "__main__":
    main()
