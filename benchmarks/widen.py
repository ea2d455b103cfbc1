"""Makes a larger model of a Qwen2 GGUF that says the same, or nearly: a target for a draft model
where no larger one of its vocabulary is at hand. Runs in an environment with `gguf` and numpy.

    widen.py SOURCE.gguf OUT.gguf [--noise 0.1] [--type Q5_0]

The result has the shape of Qwen2.5-1.5B (28 layers, width 1536, feed-forward 8960, as many weights
of queries, keys and values, in heads of 64). What SOURCE has not is nought: further layers add
nothing to the stream, further channels hold nothing. So it costs what such a model costs, and takes
the tokens that SOURCE takes. `--noise` moves each weight of the blocks by so much of its tensor's
deviation, so that it agrees with SOURCE less often, as a model of another training would.
"""

import argparse

import gguf
import numpy as np

WIDTH, INNER, LAYERS, HEADS, GROUPS, HEAD = 1536, 8960, 28, 24, 4, 64
_SIZES = {
    "qwen2.block_count": LAYERS,
    "qwen2.embedding_length": WIDTH,
    "qwen2.feed_forward_length": INNER,
    "qwen2.attention.head_count": HEADS,
    "qwen2.attention.head_count_kv": GROUPS,
}
_SHAPES = {
    "attn_norm.weight": (WIDTH,),
    "ffn_norm.weight": (WIDTH,),
    "attn_q.weight": (HEADS * HEAD, WIDTH),
    "attn_k.weight": (GROUPS * HEAD, WIDTH),
    "attn_v.weight": (GROUPS * HEAD, WIDTH),
    "attn_q.bias": (HEADS * HEAD,),
    "attn_k.bias": (GROUPS * HEAD,),
    "attn_v.bias": (GROUPS * HEAD,),
    "attn_output.weight": (WIDTH, HEADS * HEAD),
    "ffn_gate.weight": (INNER, WIDTH),
    "ffn_up.weight": (INNER, WIDTH),
    "ffn_down.weight": (WIDTH, INNER),
}


def heads_of(small: np.ndarray, places: list[int], count: int) -> np.ndarray:
    """Rows of heads at their new places among `count` heads; the rest is nought."""
    heads = small.reshape(-1, HEAD, *small.shape[1:])
    out = np.zeros((count, *heads.shape[1:]), np.float32)
    out[places] = heads[: len(places)] if len(heads) >= len(places) else heads.repeat(2, axis=0)
    return out.reshape(count * HEAD, *small.shape[1:])


def widened(name: str, small: np.ndarray, ratio: float) -> np.ndarray:
    """name: behind that of the block; ratio: of the widths, by which norms see smaller streams."""
    if name in ("attn_norm.weight", "ffn_norm.weight"):
        return _padded(small * ratio, (WIDTH,))
    if name.startswith("attn_q."):
        return _padded(heads_of(small, _query_places(), HEADS), _SHAPES[name])
    if name.startswith(("attn_k.", "attn_v.")):
        return _padded(heads_of(small, list(range(GROUPS)), GROUPS), _SHAPES[name])
    if name == "attn_output.weight":
        columns = heads_of(np.ascontiguousarray(small.T), _query_places(), HEADS).T
        return _padded(columns, _SHAPES[name])
    return _padded(small, _SHAPES[name])


def _query_places() -> list[int]:
    """The 14 heads, 7 for each of two groups, among 24 in four groups of which two are alike."""
    return [*range(7), *range(12, 19)]


def _padded(small: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    out = np.zeros(shape, np.float32)
    out[tuple(slice(0, n) for n in small.shape)] = small
    return out


def _copy_facts(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        within = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(
            field.name, _SIZES.get(field.name, field.contents()), kind, sub_type=within
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--type", default="Q5_0")
    options = parser.parse_args()
    reader, random = gguf.GGUFReader(options.source), np.random.default_rng(1)
    writer = gguf.GGUFWriter(options.out, "qwen2")
    _copy_facts(reader, writer)
    mine = gguf.GGMLQuantizationType[options.type]
    tensors = {each.name: each for each in reader.tensors}
    ratio = (int(tensors["output_norm.weight"].shape[0]) / WIDTH) ** 0.5

    def read(name: str) -> np.ndarray:
        return gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)

    def put(name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
        if values.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    head = tensors.get("output.weight", tensors["token_embd.weight"])
    put("output_norm.weight", _padded(read("output_norm.weight") * ratio, (WIDTH,)), mine)
    for name, source, kind in (
        ("token_embd.weight", "token_embd.weight", mine),
        ("output.weight", head.name, gguf.GGMLQuantizationType.Q8_0),
    ):
        small = read(source)
        put(name, _padded(small, (len(small), WIDTH)), kind)
    for layer in range(LAYERS):
        for name, shape in _SHAPES.items():
            place = f"blk.{layer}.{name}"
            if place not in tensors:
                put(place, np.ones(shape) if len(shape) == 1 else np.zeros(shape, np.float32), mine)
                continue
            small = read(place)
            if small.ndim == 2:
                noise = random.standard_normal(small.shape, np.float32)
                small = small + options.noise * small.std() * noise
            put(place, widened(name, small, ratio), mine)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
