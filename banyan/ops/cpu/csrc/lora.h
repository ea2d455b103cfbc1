// Low-rank adapters beside a projection: what their kernels are told, and the tables of kernels.
#pragma once
#include <atomic>

#include "linear.h"

namespace banyan {

constexpr int ADAPTER_PARTS = 4;  // as ops/lora.py has it
constexpr int TILE = 16;          // outputs, or inputs, that lie side by side
constexpr int RANKS = 8;          // rows of `down` that lie together: a unit of the first product
// TILED is INT8 with `down` as a weight of its own, in the tiles of linear.h (W8): it is multiplied as
// the base's weights are, with the very inputs that were rounded for these.
enum AdapterType : int64_t {
  ADAPTER_FP32 = 0, ADAPTER_BF16 = 1, ADAPTER_FP16 = 2, ADAPTER_INT8 = 3, ADAPTER_TILED = 4
};
inline int64_t bytes_of(int64_t type) {
  return type == ADAPTER_FP32 ? 4 : type >= ADAPTER_INT8 ? 1 : 2;
}

// What one adapter has for one projection; all zero where it has nothing. ops/lora.py writes it.
struct AdapterPair {
  const void* down;     // by RANKS rows, of all parts over one another, the rest last:
                        // [inputs / TILE, rounded up][rows][TILE], zeros behind the inputs
  const void* up;       // of each part [tiles][part.rank][TILE], zeros beside its outputs
  const float* scales;  // [rank], up to a multiple of GROUP where it is TILED
  int64_t rank, type;
  struct Part {
    int64_t first_tile, tiles, first_rank, rank;  // tiles of the projection's outputs
  } parts[ADAPTER_PARTS];
};

// How far the first products of a run are, and what they read.
struct AdapterState {
  alignas(64) std::atomic<int64_t> claimed, from[2];  // units; of these from the first and the last on
  int64_t units, bytes;                               // of this run
  const AdapterPair* table;
  const int32_t* pieces;
  int64_t inputs;
  alignas(64) std::atomic<int64_t> done;
};

// Pieces say which tokens of a step have which adapter: [0] how many, then (adapter, first, count) of
// each, in places of `order`, which holds the tokens.
struct AdapterArgs {
  const AdapterPair* table;
  const int32_t *pieces, *order;
  const int32_t* numbers;  // [tokens], the adapter of each; not filled where there are no pieces
  const float* x;          // [tokens, inputs]
  float* out;              // [tokens, outputs]
  float* inner;            // [tokens, width]: down · x, scaled; nobody else's until the op is done
  AdapterState* state;
  int64_t x_stride, out_stride, inputs, outputs, width;
};

struct AdapterKernels {
  // Add what belongs to the tiles [begin, end) of the outputs of the tokens [first, last).
  void (*expand)(const AdapterArgs& args, int64_t begin, int64_t end, int64_t first, int64_t last);
  // A block of the rows of `down` with the rows `from` of x, into the rows `to` of `inner`, `count` of
  // either.
  void (*shrink_rows)(const AdapterArgs& args, const AdapterPair& pair, int64_t block,
                      const int32_t* from, const int32_t* to, int32_t count);
  // Add what belongs to one tile of a part to the TILE outputs of one token; inner: its row. The
  // tiles of a part are counted from its first one.
  void (*expand_tile)(const AdapterPair& pair, int part, int64_t tile, const float* inner, float* out);
};

extern const AdapterKernels lora_base, lora_avx2, lora_avx512;
const AdapterKernels& lora_table(int32_t level);

// Units of the first products in a run of so many tokens. A run without tokens makes logits of the one
// before: what its tokens were counts no more.
int64_t adapter_units(const AdapterArgs& args, int64_t tokens);
// Bytes of an adapter's `down`.
int64_t down_bytes(const AdapterPair& pair, int64_t inputs);
// One of them: some rows of `down` with the tokens of a piece. product: what was told of that beside
// which they lie, where its inputs are rounded; else null.
void shrink_unit(const AdapterArgs& args, int64_t unit, const LinearArgs* product, Worker& worker);
void adapter_cost(const AdapterArgs& args, int64_t tokens, bool is_down, double* bytes,
                  double* operations);
// Let the op before add them, where that is the product which fills `out`; whether it is.
bool join_product(Program* program, int32_t size, const AdapterArgs& args);

}  // namespace banyan
