"""What GGUF weights take in memory, and the line about those that grow."""

from pathlib import Path

import gguf
import numpy as np

from banyan.formats.gguf import growths, kept_size


def written(path: Path, **tensors: tuple[tuple[int, ...], str]) -> Path:
    """A file of tensors of zeros: shape and type by name, with _ for the dots."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, (shape, type_name) in tensors.items():
        kind = gguf.GGMLQuantizationType[type_name]
        raw = np.zeros(gguf.quant_shape_to_byte_shape(shape, kind), np.uint8)
        writer.add_tensor(name.replace("__", "."), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_matrices_count_as_they_are_kept_and_the_embedding_as_it_lies_in_the_file(tmp_path):
    path = written(
        tmp_path / "m.gguf",
        token_embd__weight=((64, 256), "IQ2_XS"),
        output__weight=((64, 256), "IQ2_XS"),
        blk__0__attn_q__weight=((32, 256), "Q4_K"),
    )
    assert kept_size(str(path)) == 64 * 74 + 64 * 8 * 20 + 32 * 8 * 20


def test_an_embedding_that_is_the_head_too_counts_twice(tmp_path):
    path = written(tmp_path / "m.gguf", token_embd__weight=((64, 256), "IQ2_XS"))
    assert kept_size(str(path)) == 64 * 74 + 64 * 8 * 20


def test_types_that_grow_are_reported_with_both_sizes():
    mib = 1 << 20
    stored = {"IQ2_XS": 100 * mib, "Q4_K": 90 * mib, "F32": mib}
    kept = {"IQ2_XS": 216 * mib, "Q4_K": 100 * mib, "F32": 0}
    assert growths(stored, kept) == [
        "IQ2_XS weights are kept in 5 bits each, for which there are kernels: 100 MiB of the "
        "file take 216 MiB"
    ]
