"""How often things fail, and ways to make a real runner fail at a chosen step, from outside it:
spoiled models and ops."""

from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.layers.step_inputs import StepInputs
from banyan.ops.api import MultiStepInputs, Ops, Recorder, Recording
from tests.border.page_model import PageModel


@dataclass
class Faults:
    """Probabilities, per opportunity."""

    row: float = 0.0
    step: float = 0.0
    copy: float = 0.0
    order: float = 0.0
    good_draft: float = 0.6


class InjectedError(Exception):
    """A fault that the kit asked for."""


@dataclass
class Injector:
    """What goes wrong in the next forward pass.

    Attributes:
        step: "" | "before" | "after": the pass raises before or after it has written K and V.
        nan_tokens: indices along the step's tokens whose hidden states become NaN; only where
            the model is called.
    """

    step: str = ""
    nan_tokens: tuple[int, ...] = ()

    def strike(self, moment: str) -> None:
        if self.step == moment:
            raise InjectedError(f"injected {moment} the forward pass")


class FaultyModel:
    """A model whose forward pass fails on demand."""

    def __init__(self, model: PageModel, injector: Injector) -> None:
        self.model_config = model.model_config
        self.caches = model.caches
        self.prunes_to_outputs = model.prunes_to_outputs
        self.takes_features = model.takes_features
        self.towers = model.towers
        self.logits = model.logits
        self.classify = model.classify
        self._model = model
        self._injector = injector

    def forward(self, step: StepInputs) -> Tensor:
        self._injector.strike("before")
        hidden = self._model.forward(step)
        self._injector.strike("after")
        if self._injector.nan_tokens:
            tokens = torch.tensor(self._injector.nan_tokens, device=hidden.device)
            if step.output_tokens is not None:
                tokens = torch.isin(step.output_tokens.tokens, tokens).nonzero().flatten()
            hidden = hidden.index_fill(0, tokens, torch.nan)
        return hidden


class FaultyOps:
    """Ops whose recordings fail on demand."""

    def __init__(self, ops: Ops, injector: Injector) -> None:
        self._ops = ops
        self.recorder = ops.recorder and _FaultyRecorder(ops.recorder, injector)

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)


@dataclass
class _FaultyRecorder:
    recorder: Recorder
    injector: Injector

    def record(self, work, *sizes: int) -> "_FaultyRecording":
        return _FaultyRecording(self.recorder.record(work, *sizes), self.injector)


@dataclass
class _FaultyRecording:
    recording: Recording
    injector: Injector

    @property
    def result(self) -> Tensor:
        return self.recording.result

    def multi_step(self, rows: int, inputs: MultiStepInputs) -> int:
        self.injector.strike("before")
        ran = self.recording.multi_step(rows, inputs)
        self.injector.strike("after")
        return ran

    def run(self, tokens: int, *sizes: int) -> None:
        if tokens:
            self.injector.strike("before")
        self.recording.run(tokens, *sizes)
        if tokens:
            self.injector.strike("after")
