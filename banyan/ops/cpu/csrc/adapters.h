// Low-rank adapters beside a projection: what their kernels are told, and the tables of kernels.
#pragma once
#include "runtime.h"

namespace banyan {

constexpr int ADAPTER_PARTS = 4;  // as ops/adapters.py has it
enum AdapterType : int64_t { ADAPTER_FP32 = 0, ADAPTER_BF16 = 1, ADAPTER_FP16 = 2 };

// What one adapter has for one projection; all zero where it has nothing. ops/adapters.py writes it.
struct AdapterPair {
  const void* down;     // [rank, inputs]: the parts' matrices over one another
  const void* up;       // of each part [part.rank, part.outputs], one after another
  const float* scales;  // [rank]
  int64_t rank, type;
  struct Part {
    int64_t first_output, outputs, first_rank, rank;
  } parts[ADAPTER_PARTS];
};

// Which tokens of a step have which adapter: [0] pieces, then (adapter, first, count) of each piece,
// in places of `order`, which holds the tokens.
struct AdapterArgs {
  const AdapterPair* table;
  const int32_t *pieces, *order;
  const float* x;   // [tokens, inputs]
  float* out;       // [tokens, any]
  float* inner;     // [places, width]: down · x, scaled
  int64_t x_stride, out_stride, inputs, width;
};

struct AdapterKernels {
  Kernel shrink, expand;
};

extern const AdapterKernels adapters_base, adapters_avx2, adapters_avx512;

}  // namespace banyan
