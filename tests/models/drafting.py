"""Tiny random checkpoints with a layer that drafts, and what it drafts by plain torch: a token and
the state before it, as the published rule has it."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    rotate_half,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from tests.models.families import SIZES, rewrite_config, tiny

LAYERS = SIZES["num_hidden_layers"]
PlainTree = tuple[list[int], list[int]]
"""Tokens, and which of them each follows."""


class PlainMTP:
    """The published rule: the layer reads the tokens 1 … n with the states of 0 … n − 1.

    Args:
        model: the whole model, whose layer number LAYERS drafts and is not the model's.
    """

    forbidden = torch.empty(0, dtype=torch.long)
    """Ids that are not drafted."""

    def __init__(self, model: nn.Module, eps: float, weights: dict[str, Tensor]) -> None:
        self.model, self.eps, self.weights = model.model, eps, weights
        self.head = model.lm_head
        (self.layer,) = list(model.model.layers)[LAYERS:]
        del model.model.layers[LAYERS:]
        model.config.num_hidden_layers = LAYERS

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weights[name], self.eps)

    def _join(self, embedded: Tensor, states: Tensor) -> Tensor:
        both = torch.cat([self._norm(embedded, "enorm"), self._norm(states, "hnorm")], -1)
        return nn.functional.linear(both, self.weights["eh_proj"])

    def _end(self, out: Tensor) -> Tensor:
        return self._norm(out, "shared_head.norm")

    def states(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, hidden] of the model, as its head reads them."""
        return self.model(torch.tensor([list(tokens)])).last_hidden_state[0]

    def through(self, tokens: Sequence[int], states: Tensor) -> Tensor:
        """What the layer makes of tokens and the states before them, both [n]; [n, hidden]."""
        x = self._join(self.model.embed_tokens(torch.tensor(list(tokens))), states)[None]
        places = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens),) * 2, float("-inf")).triu(1)[None, None]
        angles = self.model.rotary_emb(x, position_ids=places)
        out = self.layer(x, attention_mask=mask, position_ids=places, position_embeddings=angles)
        out = out[0] if isinstance(out, tuple) else out
        return self._end(out.reshape(len(tokens), -1))

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """What follows `tokens`, the last of which the model has sampled and not read."""
        read, states = list(tokens[1:]), self.states(tokens[:-1])
        found: list[int] = []
        for _ in range(count):
            made = self.through(read, states)[-1:]
            found.append(self._draft_of(made))
            read, states = [*read, found[-1]], torch.cat([states, made])
        return found

    @torch.no_grad()
    def tree(self, tokens: Sequence[int], count: int, steps: int, breadth: int) -> PlainTree:
        """EAGLE-2's rule: `breadth` ways behind each of the `breadth` likeliest of a level, and of
        all of these the `count` likeliest; equal ones in the order in which they were found."""
        read, states = list(tokens[1:]), self.states(tokens[:-1])
        front: list[tuple[float, int, list[int], Tensor]] = [(0.0, -1, read, states)]
        seen: list[tuple[float, int, int]] = []
        for _ in range(steps):
            level: list[tuple[float, int, list[int], Tensor]] = []
            for score, at, read, states in front:
                made = self.through(read, states)[-1:]
                likely = self._logits_of(made).log_softmax(-1).topk(breadth)
                for gain, token in zip(*(each.tolist() for each in likely), strict=True):
                    seen.append((score + gain, token, at))
                    before = torch.cat([states, made])
                    level.append((score + gain, len(seen) - 1, [*read, token], before))
            front = sorted(level, key=lambda node: -node[0])[:breadth]
        best = sorted(range(len(seen)), key=lambda at: -seen[at][0])[:count]
        places = {at: place for place, at in enumerate(best)} | {-1: -1}
        return [seen[at][1] for at in best], [places[seen[at][2]] for at in best]

    def _draft_of(self, made: Tensor) -> int:
        return int(self._logits_of(made).argmax())

    def _logits_of(self, made: Tensor) -> Tensor:
        """[vocab], -inf of what is not drafted."""
        logits = self.head(made)[0]
        logits[self.forbidden] = float("-inf")
        return logits

    @torch.no_grad()
    def next_of(self, tokens: Sequence[int]) -> int:
        made = self.model(torch.tensor([list(tokens)])).last_hidden_state[0, -1]
        return int(self.head(made).argmax())


class PlainEagle(PlainMTP):
    """EAGLE's published rule: the same places, another model.

    Args:
        layer: a block of transformers without the norm before it.
        fc: brings tokens and states together.
    """

    def __init__(self, model: nn.Module, layer: nn.Module, fc: nn.Linear) -> None:
        self.model, self.head, self.layer, self.fc = model.model, model.lm_head, layer, fc

    def _join(self, embedded: Tensor, states: Tensor) -> Tensor:
        return self.fc(torch.cat([embedded, states], -1))

    def _end(self, out: Tensor) -> Tensor:
        return out


class PlainEagle3(PlainMTP):
    """EAGLE-3's published rule: what it reads is made of the inputs of some layers.

    Args:
        layer: a block of transformers whose attention reads twice the width.
        parts: its other modules, by their names in the checkpoint.
        known: ids of the model's vocabulary that it knows.
        taps: numbers of those layers.
    """

    def __init__(
        self, model: nn.Module, layer: nn.Module, parts: nn.ModuleDict, known: Tensor, taps: list
    ) -> None:
        self.model, self.head, self.layer = model.model, model.lm_head, layer
        self.parts, self.known, self.taps = parts, known, taps
        self.rotary = LlamaRotaryEmbedding(layer.self_attn.config)

    def states(self, tokens: Sequence[int]) -> Tensor:
        made = self.model(torch.tensor([list(tokens)]), output_hidden_states=True)
        inputs = [made.hidden_states[tap][0] for tap in self.taps]  # the first is the embedding
        return self.parts["fc"](torch.cat(inputs, -1))

    def through(self, tokens: Sequence[int], states: Tensor) -> Tensor:
        embedded = self.model.embed_tokens(torch.tensor(list(tokens)))
        normed = [self.layer.input_layernorm(embedded), self.parts["hidden_norm"](states)]
        places = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens),) * 2, float("-inf")).triu(1)[None, None]
        angles = self.rotary(embedded[None], position_ids=places)
        both = torch.cat(normed, -1)[None]
        attended = self.layer.self_attn(both, position_embeddings=angles, attention_mask=mask)[0]
        x = states + attended.reshape(states.shape)
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x))

    def _logits_of(self, made: Tensor) -> Tensor:
        logits = torch.full((self.head.out_features,), float("-inf"))
        logits[self.known] = self.parts["lm_head"](self.parts["norm"](made))[0]
        return logits


class PlainBlocks(PlainMTP):
    """DFlash's published rule: each layer takes keys and values from states made of the inputs of
    some layers, behind them the newest token and masks read each other, and each mask tells the
    token in its place.

    Args:
        layers: blocks of transformers.
        parts: its other modules, by their names in the checkpoint.
        taps: numbers of those layers.
    """

    def __init__(
        self, model: nn.Module, layers: nn.ModuleList, parts: nn.ModuleDict, taps: list, mask: int
    ) -> None:
        self.model, self.head, self.layers = model.model, model.lm_head, layers
        self.parts, self.taps, self.mask = parts, taps, mask
        self.rotary = Qwen3RotaryEmbedding(layers[0].self_attn.config)

    def states(self, tokens: Sequence[int]) -> Tensor:
        made = self.model(torch.tensor([list(tokens)]), output_hidden_states=True)
        inputs = [made.hidden_states[tap][0] for tap in self.taps]  # the first is the embedding
        return self.parts["hidden_norm"](self.parts["fc"](torch.cat(inputs, -1)))

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        states = self.states(tokens[:-1])
        block = torch.tensor([tokens[-1], *[self.mask] * count])
        x, places = self.model.embed_tokens(block), torch.arange(len(tokens) + count)[None]
        cos, sin = self.rotary(x[None], position_ids=places)
        for layer in self.layers:
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), states, cos[0], sin[0])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(self.parts["norm"](x[1:])).argmax(-1).tolist()

    def _attend(
        self, attention: nn.Module, x: Tensor, states: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        size, both = attention.head_dim, torch.cat([states, x])
        q = attention.q_norm(attention.q_proj(x).unflatten(-1, (-1, size))).transpose(0, 1)
        k = attention.k_norm(attention.k_proj(both).unflatten(-1, (-1, size))).transpose(0, 1)
        v = attention.v_proj(both).unflatten(-1, (-1, size)).transpose(0, 1)
        q = q * cos[-len(x) :] + rotate_half(q) * sin[-len(x) :]
        k = k * cos + rotate_half(k) * sin
        shared = len(q) // len(k)
        k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        weights = (q @ k.transpose(1, 2) * size**-0.5).softmax(-1)
        return attention.o_proj((weights @ v).transpose(0, 1).flatten(1))


def tiny_blocks(
    variant: str,
    target: Path,
    draft: Path,
    noise: float = 0.5,
    block: int = 6,
    **more: object,
) -> PlainBlocks:
    """A model of a variant, and one of DFlash's kind that was made to draft for it; arguments as
    `tiny_mtp`.

    Args:
        block: tokens that the draft model was trained for.
    """
    model = tiny(variant, target, **more)
    size, generator = model.config.hidden_size, torch.Generator().manual_seed(5)
    facts = {key: getattr(model.config, key) for key in SIZES if hasattr(model.config, key)}
    heads = {"head_dim": 16, "num_hidden_layers": 2}
    config = Qwen3Config(**facts | heads)
    config._attn_implementation = "eager"
    layers = nn.ModuleList(Qwen3DecoderLayer(config, layer) for layer in range(2))
    taps = [1, 3]
    parts = nn.ModuleDict(
        {
            "fc": nn.Linear(len(taps) * size, size, bias=False),
            "hidden_norm": nn.RMSNorm(size, config.rms_norm_eps),
            "norm": nn.RMSNorm(size, config.rms_norm_eps),
        }
    )
    with torch.no_grad():
        for parameter in [*layers.parameters(), *parts.parameters()]:
            wide = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(wide + (parameter.dim() == 1))
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter *= noise
        # Tokens like to follow themselves, until noise makes another one come. What drafts reads
        # which tokens there were, and takes the mean of them.
        embedding, mask = model.model.embed_tokens.weight, config.vocab_size - 1
        embedding *= 5
        embedding[mask] *= 0.1
        model.lm_head.weight += 0.15 * embedding / model.model.norm.weight
        parts["fc"].weight.copy_(torch.cat([torch.eye(size), noise * torch.eye(size)], -1))
        for layer in layers:
            attention = layer.self_attn
            shared = config.num_attention_heads // config.num_key_value_heads
            back = attention.v_proj.weight.unflatten(0, (-1, config.head_dim))
            back = back.repeat_interleave(shared, 0).flatten(0, 1).T
            attention.o_proj.weight.copy_(2 * back + noise * attention.o_proj.weight)
            layer.mlp.down_proj.weight *= noise
        parts["norm"].weight.copy_(model.model.norm.weight)
    model.save_pretrained(target)
    draft.mkdir(parents=True, exist_ok=True)
    config.architectures = ["DFlashDraftModel"]
    config.save_pretrained(draft)
    listed = {"target_layer_ids": [tap - 1 for tap in taps], "mask_token_id": mask}
    rewrite_config(
        draft, dflash_config=listed, block_size=block, num_target_layers=LAYERS, rope_scaling=None
    )
    stored = {f"layers.{name}": value for name, value in layers.state_dict().items()}
    stored |= {f"{name}.weight": parts[name].weight.data for name in parts}
    save_file(stored, draft / "model.safetensors", metadata={"format": "pt"})
    return PlainBlocks(model, layers.eval(), parts, taps, mask)


def tiny_eagle3(
    variant: str, target: Path, draft: Path, noise: float = 0.03, known: int = 88, **more: object
) -> PlainEagle3:
    """A model of a variant, and one of EAGLE-3 that was made to draft for it; arguments as
    `tiny_mtp`.

    Args:
        known: how many tokens the draft model knows.
    """
    model = tiny(variant, target, **more)
    size, generator = model.config.hidden_size, torch.Generator().manual_seed(5)
    heads = model.config.num_attention_heads
    facts = {key: getattr(model.config, key) for key in SIZES if hasattr(model.config, key)}
    changes = {"num_hidden_layers": 1, "num_key_value_heads": heads}
    config = LlamaConfig(**facts | changes)
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0)
    taps = [1, 2, 3]
    parts = nn.ModuleDict(
        {
            "fc": nn.Linear(len(taps) * size, size, bias=False),
            "hidden_norm": nn.RMSNorm(size, config.rms_norm_eps),
            "norm": nn.RMSNorm(size, config.rms_norm_eps),
            "lm_head": nn.Linear(size, known, bias=False),
        }
    )

    def spread(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ids = torch.randperm(config.vocab_size, generator=generator)[:known].sort().values
    with torch.no_grad():
        for parameter in [*layer.parameters(), *parts["hidden_norm"].parameters()]:
            parameter.copy_(spread(*parameter.shape) * 0.2 + (parameter.dim() == 1))
        for name, parameter in [*model.named_parameters(), *layer.named_parameters()]:
            if "o_proj" in name or "down_proj" in name:
                parameter *= noise
        model.model.embed_tokens.weight *= 5
        # Each token looks at itself, and hands on its embedding; all else is noise.
        itself = torch.cat([torch.eye(size), noise * spread(size, size)], -1)
        for name, factor in {"q_proj": 4.0, "k_proj": 4.0, "v_proj": 1.0}.items():
            linear = nn.Linear(2 * size, size, bias=False)
            linear.weight.copy_(factor * itself)
            setattr(layer.self_attn, name, linear)
        layer.self_attn.o_proj.weight += torch.eye(size)
        parts["fc"].weight.copy_(noise * spread(size, len(taps) * size))
        parts["norm"].weight.copy_(model.model.norm.weight)
        parts["lm_head"].weight.copy_(model.lm_head.weight[ids])
    model.save_pretrained(target)
    draft.mkdir(parents=True, exist_ok=True)
    config.architectures = ["LlamaForCausalLMEagle3"]
    config.save_pretrained(draft)
    listed = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
    rewrite_config(draft, draft_vocab_size=known, eagle_config=listed)
    stored = {f"midlayer.{name}": value for name, value in layer.state_dict().items()}
    stored |= {"midlayer.hidden_norm.weight": parts["hidden_norm"].weight.data}
    stored |= {f"{name}.weight": parts[name].weight.data for name in ("fc", "norm", "lm_head")}
    stored["d2t"] = ids - torch.arange(known)
    stored["t2d"] = torch.isin(torch.arange(config.vocab_size), ids)
    save_file(stored, draft / "model.safetensors", metadata={"format": "pt"})
    return PlainEagle3(model, layer.eval(), parts, ids, taps)


def tiny_eagle(
    variant: str, target: Path, draft: Path, noise: float = 0.05, **more: object
) -> PlainEagle:
    """A model of a variant, and one that was made to draft for it; arguments as `tiny_mtp`."""
    model = tiny(variant, target, **more)
    size, generator = model.config.hidden_size, torch.Generator().manual_seed(5)
    facts = {key: getattr(model.config, key) for key in SIZES if hasattr(model.config, key)}
    config = LlamaConfig(**facts | {"num_hidden_layers": 1})
    config._attn_implementation = "eager"
    layer, fc = LlamaDecoderLayer(config, 0), nn.Linear(2 * size, size)
    layer.input_layernorm = nn.Identity()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        for name, parameter in [*model.named_parameters(), *layer.named_parameters()]:
            if "o_proj" in name or "down_proj" in name:
                parameter *= noise
        model.model.embed_tokens.weight *= 5
        small = noise * 0.3 * torch.randn(size, size, generator=generator)
        fc.weight.copy_(torch.cat([torch.diag(model.model.norm.weight), small], -1))
        fc.bias.copy_(0.01 * torch.randn(size, generator=generator))
    model.save_pretrained(target)
    draft.mkdir(parents=True, exist_ok=True)
    config.architectures = ["LlamaForCausalLMEagle"]
    config.save_pretrained(draft)
    stored = {f"layers.0.{name}": value for name, value in layer.state_dict().items()}
    stored |= {"fc.weight": fc.weight.data, "fc.bias": fc.bias.data}
    stored["embed_tokens.weight"] = model.model.embed_tokens.weight.data.clone()
    save_file(stored, draft / "model.safetensors", metadata={"format": "pt"})
    return PlainEagle(model, layer.eval(), fc)


def tiny_mtp(variant: str, folder: Path, noise: float = 0.05, **more) -> PlainMTP:
    """A model of a variant whose checkpoint has a layer more, which drafts.

    Args:
        noise: size of what blocks add to the embedding. The smaller, the more does the next token
            depend on the last one alone, and the more often do the drafts come true.
    """
    model = tiny(variant, folder, num_hidden_layers=LAYERS + 1, **more)
    size, generator = model.config.hidden_size, torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name or "out_proj" in name:
                parameter *= noise
        model.model.embed_tokens.weight *= 5  # of the size of what a norm makes of it

    def spread(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {
        "enorm": 1 + 0.02 * spread(size),
        "hnorm": 1 + 0.1 * spread(size),
        "eh_proj": torch.cat([torch.eye(size), noise * 0.3 * spread(size, size)], -1),
        "shared_head.norm": model.model.norm.weight.detach().clone(),
    }
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    stored |= {f"model.layers.{LAYERS}.{name}.weight": value for name, value in weights.items()}
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    stored |= {
        f"model.layers.{LAYERS}.{name}.weight": stored[f"{of}.weight"].clone()
        for name, of in copies.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    listed = getattr(model.config, "mlp_layer_types", None)
    mine = {} if listed is None else {"mlp_layer_types": listed[:LAYERS]}
    rewrite_config(folder, num_hidden_layers=LAYERS, num_nextn_predict_layers=1, **mine)
    return PlainMTP(model, model.config.rms_norm_eps, weights)


def tiny_next(variant: str, folder: Path, **more: object) -> PlainMTP:
    """Qwen3-Next's and Qwen3.5's form of the same: other names, and norms around nought; what comes
    before has layers that keep a state."""
    kinds = ["linear_attention", "full_attention"] * 2
    plain = tiny_mtp(variant, folder, layer_types=[*kinds, "full_attention"], **more)
    mine = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    stored = {}
    for name, value in load_file(folder / "model.safetensors").items():
        own = name.removeprefix(f"model.layers.{LAYERS}.")
        stem = own.removesuffix(".weight")
        if own == name:
            stored[name] = value
        elif stem in mine:
            stored[f"mtp.{mine[stem]}.weight"] = value - 1
        elif stem in ("eh_proj", "shared_head.norm"):
            stored["mtp.fc.weight" if stem == "eh_proj" else "mtp.norm.weight"] = value
        elif not own.startswith(("embed_tokens", "shared_head.head")):
            stored[f"mtp.layers.0.{own}"] = value
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    rewrite_config(
        folder, layer_types=kinds, num_nextn_predict_layers=None, mtp_num_hidden_layers=1
    )
    plain.weights["shared_head.norm"] = 1 + plain.weights["shared_head.norm"]
    return plain


def tiny_mimo(folder: Path, **more: object) -> PlainMTP:
    """MiMo's form of the same: other names, and the state before the token."""
    plain = tiny_mtp("qwen2", folder, **more)
    mine = {
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "eh_proj": "input_proj",
        "shared_head.norm": "final_layernorm",
    }
    stored = {}
    for name, value in load_file(folder / "model.safetensors").items():
        own = name.removeprefix(f"model.layers.{LAYERS}.")
        if own == name:
            stored[name] = value
        elif not own.startswith(("embed_tokens", "shared_head.head")):
            stem = own.removesuffix(".weight")
            own = f"{mine[stem]}.weight" if stem in mine else own
            is_join = stem == "eh_proj"
            swapped = torch.cat(value.chunk(2, -1)[::-1], -1) if is_join else value
            stored[f"model.mtp_layers.0.{own}"] = swapped
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    rewrite_config(folder, architectures=["MiMoForCausalLM"], model_type="mimo")
    return plain
