"""transformers as /v1/completions: `generate` on static batches of whatever waits.

transformers_server.py MODEL_FOLDER PORT [--dtype float32|bfloat16]

Requests that arrive while a batch runs form the next one; a batch takes the requests whose answers
are as long as its first one's.
"""

import argparse

import torch
from front import Inbox, Work, serve
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

_MAX_BATCH = 32


class Fanout(BaseStreamer):
    """Passes each step's tokens on to the requests of the batch."""

    def __init__(self, batch: list[Work]) -> None:
        self._batch = batch
        self._steps = -1

    def put(self, value: torch.Tensor) -> None:
        self._steps += 1
        if self._steps == 0:
            return  # the prompts themselves come first
        for work, token in zip(self._batch, value.flatten().tolist(), strict=True):
            work.emit([token], False, [])

    def end(self) -> None:
        pass


class Engine:
    def __init__(self, folder: str, dtype: str, inbox: Inbox) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model.eval()
        self._model.generation_config.eos_token_id = None
        self._inbox = inbox
        self._waiting: list[Work] = []

    @torch.inference_mode()
    def run(self) -> None:
        while True:
            self._waiting += self._inbox.take(wait=not self._waiting)
            first = self._waiting[0]
            same = [w for w in self._waiting if self._fits(w, first)][:_MAX_BATCH]
            self._waiting = [w for w in self._waiting if not any(w is s for s in same)]
            if first.top:
                self._score(first)
            else:
                self._generate(same)

    @staticmethod
    def _fits(work: Work, first: Work) -> bool:
        if first.top or work.top:
            return work is first
        return work.max_tokens == first.max_tokens

    def _generate(self, batch: list[Work]) -> None:
        longest = max(len(work.ids) for work in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, work in enumerate(batch):
            ids[row, longest - len(work.ids) :] = torch.tensor(work.ids)
            mask[row, longest - len(work.ids) :] = 1
        self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=batch[0].max_tokens,
            min_new_tokens=batch[0].max_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=Fanout(batch),
        )
        for work in batch:
            work.emit([], True, [])

    def _score(self, work: Work) -> None:
        """One token with its best alternatives."""
        logits = self._model(torch.tensor([work.ids]), logits_to_keep=1).logits[0, -1].float()
        best, ids = logits.log_softmax(-1).topk(work.top)
        scores = {f"token_id:{i}": lp for i, lp in zip(ids.tolist(), best.tolist(), strict=True)}
        work.emit([int(ids[0])], True, [scores])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    inbox = Inbox()
    engine = Engine(options.model, options.dtype, inbox)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    serve(
        options.port,
        inbox,
        lambda text: tokenizer(text).input_ids,
        lambda ids: tokenizer.decode(ids),
        engine.run,
    )


if __name__ == "__main__":
    main()
