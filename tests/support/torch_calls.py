"""Finds calls of torch that are no ops."""

from torch.utils._python_dispatch import TorchDispatchMode

from banyan.layers.build import Build
from banyan.models.weights.loader import load_model
from banyan.ops.api import OP_NAMES, PACKED_OPS
from tests.models.conftest import PagedModel

VIEWS = {"view", "split", "split_with_sizes", "slice", "unsqueeze", "select", "_unsafe_view"}

VIEWS |= {"expand"}


class Watched:
    """Ops that tell when one of them runs."""

    def __init__(self, ops) -> None:
        self.depth = 0
        self.cache_dtype = ops.cache_dtype
        self.recorder = None
        for name in OP_NAMES:
            if name not in PACKED_OPS:
                setattr(self, name, self.watch(getattr(ops, name)))
        for name in PACKED_OPS:
            setattr(self, f"pack_{name}", self.watch_packed(getattr(ops, f"pack_{name}")))

    def watch(self, function):
        def run(*arguments):
            self.depth += 1
            try:
                return function(*arguments)
            finally:
                self.depth -= 1

        return run

    def watch_packed(self, pack):
        return lambda *arguments, **more: self.watch(pack(*arguments, **more))


class Between(TorchDispatchMode):
    """Notes what torch does outside the ops that is more than a view."""

    def __init__(self, ops: Watched) -> None:
        super().__init__()
        self.ops = ops
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.ops.depth and function._schema.name.split("::")[1] not in VIEWS:
            self.found.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def torch_calls(model_config, ops, load_format="auto"):
    """Names of torch's own operations within a forward pass and its logits."""
    watched = Watched(ops)
    model = load_model(model_config, Build(watched), load_format)
    paged = PagedModel(model)
    step = paged.prepare([(0, list(range(9)))])
    attention = watched.watch(step.attention)
    object.__setattr__(step, "attention", attention)
    with Between(watched) as between:
        model.logits(model(step)[-1:])
    return between.found
