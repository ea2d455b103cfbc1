"""Requests with text, and their tokenizer."""

from banyan.base.ids import RequestId
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.request_spec import ScoreOptions, spec_of
from banyan.requests.sampling_params import Limits
from banyan.tokenizer.stop_strings import TextOptions
from tests.support.fake_engine import EOS, VOCAB, ids_of, letters

TOKENIZER = letters()

LIMITS = Limits(context_length=1024, vocab_size=VOCAB, eos_ids=(EOS,))


def request(prompt="Hi", max_new_tokens=100, **options):
    text = {k: options.pop(k) for k in list(options) if k in TextOptions.__dataclass_fields__}
    scores = options.pop("scores", ScoreOptions())
    sampling = SamplingParams(max_new_tokens=max_new_tokens, **{"stop_ids": (EOS,), **options})
    return spec_of(RequestId("r"), ids_of(prompt), sampling, TextOptions(**text), scores)
