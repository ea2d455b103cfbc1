// What adapters do to whole rows of the embedding, of logits and of projections. Plain code: few rows
// go through it, and only where adapters of these kinds were asked for.
//
// A row is made of itself and its adapter alone, so its bits are the same in any company.
#include <algorithm>
#include <cstring>

#include "runtime.h"

using namespace banyan;

namespace {

constexpr int64_t BLOCK = 2048;  // outputs of one unit
constexpr int SUMS = 16;         // partial sums of a product, so that it is computed in vectors
enum Kind : int64_t {
  LOOKED_UP = 1, PRODUCT = 2, GAIN = 3, SOME_LOOKED_UP = 4, SOME_OUTPUTS = 5
};

// What one adapter does; all zero where it does nothing. ops/lora_rows.py writes it.
struct RowEntry {
  const float *rows, *up;
  const void* last;  // shifts of a GAIN, ids of SOME
  int64_t rank, first, count, kind, replaces;
};
struct Piece {
  int32_t adapter, first, count;
};
struct RowArgs {
  const RowEntry* table;
  const int32_t *pieces, *order;
  const void* x;  // [tokens] int64, or [tokens, inputs] float
  float* out;
  int64_t x_stride, out_stride, inputs, outputs, size;
};
const RowArgs& of(const void* args) { return *(const RowArgs*)args; }
const Piece* pieces_of(const RowArgs& a) { return (const Piece*)(a.pieces + 1); }
int32_t num_pieces(const RowArgs& a, const Sizes& sizes) {
  return sizes.n[a.size] ? a.pieces[0] : 0;
}
int64_t blocks(const RowArgs& a) { return (a.outputs + BLOCK - 1) / BLOCK; }
int64_t rows_of(const RowArgs& a, const Piece& piece) {
  return a.table[piece.adapter].kind ? piece.count : 0;
}

int64_t units(const void* args, const Sizes& sizes) {
  const RowArgs& a = of(args);
  int64_t rows = 0;
  for (int32_t i = 0; i < num_pieces(a, sizes); i++) rows += rows_of(a, pieces_of(a)[i]);
  return rows * blocks(a);
}
int64_t grain(const void*, const Sizes&) { return 1; }

float product(const float* a, const float* b, int64_t n) {
  float sums[SUMS] = {}, total = 0;
  int64_t i = 0;
  for (; i + SUMS <= n; i += SUMS)
    for (int s = 0; s < SUMS; s++) sums[s] += a[i + s] * b[i + s];
  for (; i < n; i++) total += a[i] * b[i];
  for (int s = 0; s < SUMS; s++) total += sums[s];
  return total;
}

void widen(const RowEntry& entry, const float* inner, int64_t outputs, int64_t begin, int64_t end,
           float* out) {
  if (entry.replaces) std::memset(out + begin, 0, sizeof(float) * (end - begin));
  for (int64_t r = 0; r < entry.rank; r++)
    for (int64_t o = begin; o < end; o++) out[o] += inner[r] * entry.up[r * outputs + o];
}

void one_row(const RowArgs& a, const RowEntry& entry, int64_t row, int64_t block, Worker& worker) {
  int64_t begin = block * BLOCK, end = std::min(begin + BLOCK, a.outputs);
  float* out = a.out + row * a.out_stride;
  if (entry.kind == GAIN) {
    for (int64_t o = begin; o < end; o++) out[o] = entry.rows[o] * out[o] + ((const float*)entry.last)[o];
    return;
  }
  if (entry.kind == LOOKED_UP) {
    int64_t at = ((const int64_t*)a.x)[row] - entry.first;
    if (at < 0 || at >= entry.count) return;
    if (entry.up) return widen(entry, entry.rows + at * entry.rank, a.outputs, begin, end, out);
    const float* found = entry.rows + at * a.outputs;
    for (int64_t o = begin; o < end; o++) out[o] = entry.replaces ? found[o] : out[o] + found[o];
    return;
  }
  const int64_t *ids = (const int64_t*)entry.last, *end_of_ids = ids + entry.count;
  if (entry.kind == SOME_LOOKED_UP) {
    int64_t token = ((const int64_t*)a.x)[row];
    const int64_t* id = std::lower_bound(ids, end_of_ids, token);
    if (id == end_of_ids || *id != token) return;
    const float* found = entry.rows + (id - ids) * a.outputs;
    for (int64_t o = begin; o < end; o++) out[o] = found[o];
    return;
  }
  const float* x = (const float*)a.x + row * a.x_stride;
  if (entry.kind == SOME_OUTPUTS) {
    const int64_t* id = std::lower_bound(ids, end_of_ids, begin);
    for (; id < end_of_ids && *id < end; id++)
      out[*id] = product(entry.rows + (id - ids) * a.inputs, x, a.inputs);
    return;
  }
  if (entry.up) {
    float* inner = (float*)worker.scratch(sizeof(float) * entry.rank);
    for (int64_t r = 0; r < entry.rank; r++)
      inner[r] = product(entry.rows + r * a.inputs, x, a.inputs);
    return widen(entry, inner, a.outputs, begin, end, out);
  }
  for (int64_t o = begin; o < end; o++) {
    float made = product(entry.rows + o * a.inputs, x, a.inputs);
    out[o] = entry.replaces ? made : out[o] + made;
  }
}

void run(const void* args, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const RowArgs& a = of(args);
  int64_t at = 0;
  for (const Piece* piece = pieces_of(a); at < end; piece++) {
    int64_t here = rows_of(a, *piece) * blocks(a);
    for (int64_t i = std::max(begin - at, (int64_t)0); i < std::min(end - at, here); i++)
      one_row(a, a.table[piece->adapter], a.order[piece->first + i / blocks(a)], i % blocks(a),
              worker);
    at += here;
  }
}

void cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const RowArgs& a = of(args);
  *bytes = *operations = 0;
  for (int32_t i = 0; i < num_pieces(a, sizes); i++) {
    const Piece& piece = pieces_of(a)[i];
    const RowEntry& entry = a.table[piece.adapter];
    if (entry.kind == SOME_LOOKED_UP || entry.kind == SOME_OUTPUTS) {
      double width = (double)(entry.kind == SOME_OUTPUTS ? entry.count * a.inputs : a.outputs);
      *bytes += 4 * width * piece.count;
      *operations += 2 * width * piece.count;
      continue;
    }
    double inputs = entry.kind == PRODUCT ? (double)a.inputs : 1;
    double weights = entry.up ? (double)entry.rank * (inputs + (double)a.outputs)
                              : (double)a.outputs * inputs;
    *bytes += entry.kind ? 4 * weights * piece.count : 0;
    *operations += entry.kind ? 2 * weights * piece.count : 0;
  }
}

const Kernel ROWS_OF_ADAPTERS = {"adapter_rows", units, grain, run, cost};

}  // namespace

// Does to the rows of `out` what the parts of their adapters say.
BN_EXPORT void bn_lora_rows(Program* program, int32_t size, const void* table,
                               const int32_t* pieces, const int32_t* order, const void* x,
                               int64_t x_stride, float* out, int64_t out_stride, int64_t inputs,
                               int64_t outputs) {
  RowArgs args{(const RowEntry*)table, pieces, order, x, out, x_stride, out_stride, inputs, outputs,
               size};
  append(program, ROWS_OF_ADAPTERS, &args, sizeof args, NOT_ROW_WISE);
}
