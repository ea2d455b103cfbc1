"""Memory of a GGUF file's weights if compiled CPU kernels keep them in blocks.

Types without a packed form are converted to the nearest one, which takes up to three times the
file's size. The layouts are in ops/cpu/csrc/linear.h.
"""

import math
from collections import Counter
from collections.abc import Mapping

from banyan.formats.gguf import GGUFFile
from banyan.formats.shards import files_of_weights

KEPT_BYTES = {
    **{"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "MXFP4": 18},
    **{"Q2_K": 24, "Q3_K": 20, "Q4_K": 20, "Q5_K": 24, "Q6_K": 28},
    **{"IQ4_NL": 18, "IQ4_XS": 18, "IQ3_XXS": 18, "IQ3_S": 22, "IQ2_XXS": 20, "IQ2_XS": 20},
    **{"IQ2_S": 20, "IQ1_S": 20, "IQ1_M": 28, "TQ1_0": 18, "TQ2_0": 18},
}
"""Of 32 weights of a matrix, by the type of the file; floats stay as they are."""
_LOGGED_FROM = 1.5
"""Growth that is logged."""
_EMBEDDING = "token_embd.weight"
_MIB = 1 << 20


def kept_size(path: str) -> int:
    """Bytes of the weights of a GGUF file, or of the folder that has its parts, in memory."""
    size, has_head, embedding = 0, False, 0
    for file in files_of_weights(path):
        with GGUFFile.open(str(file), has_words=False) as opened:
            for tensor in opened.tensors.values():
                has_head |= tensor.name == "output.weight"
                kept = kept_bytes(tensor.type, tensor.shape) or tensor.size_bytes
                if tensor.name == _EMBEDDING:  # read from the file row by row
                    embedding, kept = kept, tensor.size_bytes
                size += kept
    return size + (0 if has_head else embedding)


def kept_bytes(type: str, shape: tuple[int, ...]) -> int:
    """Of one weight; 0 where it stays as it is."""
    return math.prod(shape) // 32 * KEPT_BYTES.get(type, 0) if len(shape) > 1 else 0


def growths(stored: Mapping[str, int], kept: Mapping[str, int]) -> list[str]:
    """Lines for the types that take much more memory than they do in the file."""
    grown = Counter({t: kept[t] for t in stored if kept[t] > _LOGGED_FROM * stored[t]})
    return [
        f"{type} weights are kept in {KEPT_BYTES[type] / 4:g} bits each, for which there are "
        f"kernels: {stored[type] / _MIB:,.0f} MiB of the file take {size / _MIB:,.0f} MiB"
        for type, size in grown.most_common()
    ]
