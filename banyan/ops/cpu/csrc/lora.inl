// LoRA adapters for one instruction set. Compiled once per set, as BN_TABLE (FAMILIES of build.py).
//
// A piece is some tokens of one adapter, so each matrix is read once for all of them. Every number
// has one order of additions, from the first input or rank to the last, whatever is beside it: a
// token's result depends on that token alone.
#include <algorithm>

#include "lora.h"
#include "vec.h"

namespace banyan {
namespace {

constexpr int VECTORS = TILE / LANES;                // of a tile
constexpr int TOKENS_AT_ONCE = LANES == 16 ? 2 : 1;  // what the registers hold, by RANKS rows
constexpr int ROWS_AT_ONCE = 4;                      // tokens of one adapter that share its tile
constexpr int64_t LINE = 64, AHEAD = 1024;           // bytes

struct Fp32 {
  typedef float type;
  static vf get(const float* p) { return load(p); }
};
struct Bf16 {
  typedef uint16_t type;
  static vf get(const uint16_t* p) { return load_bf16(p); }
};
struct Fp16 {
  typedef uint16_t type;
  static vf get(const uint16_t* p) { return load_fp16(p); }
};

struct Int8 {
  typedef int8_t type;
  static vf get(const int8_t* p) { return load_int8(p); }
};

// Rows of x, and the rows of `inner` that they go to.
struct Rows {
  const int32_t *from, *to;
  int32_t count;
};

// Rows of `down` with some rows. tiles: [inputs / TILE][stride / TILE rows][TILE].
template <class T, int R, int N>
void multiply(const AdapterArgs& a, const typename T::type* tiles, int64_t stride, const Rows& rows,
              int32_t at, const float* scales, int64_t first) {
  const float* x[N];
  vf sums[N][R] = {};
  for (int n = 0; n < N; n++) x[n] = a.x + rows.from[at + n] * a.x_stride;
  int64_t i = 0;
  for (; i + TILE <= a.inputs; i += TILE, tiles += stride) {
    for (int64_t at = 0; at < R * TILE * (int64_t)sizeof *tiles; at += LINE)
      __builtin_prefetch((const uint8_t*)tiles + AHEAD + at);
    for (int v = 0; v < TILE; v += LANES) {
      vf inputs[N];
      for (int n = 0; n < N; n++) inputs[n] = load(x[n] + i + v);
      for (int r = 0; r < R; r++) {
        vf w = T::get(tiles + r * TILE + v);
        for (int n = 0; n < N; n++) sums[n][r] = fma(w, inputs[n], sums[n][r]);
      }
    }
  }
  for (int v = 0; i + v < a.inputs; v += LANES)
    for (int n = 0; n < N; n++) {
      vf inputs = load_some(x[n] + i + v, (int)std::min((int64_t)LANES, a.inputs - i - v));
      for (int r = 0; r < R; r++) sums[n][r] = fma(T::get(tiles + r * TILE + v), inputs, sums[n][r]);
    }
  for (int n = 0; n < N; n++)
    for (int r = 0; r < R; r++)
      a.inner[rows.to[at + n] * a.width + first + r] = sum(sums[n][r]) * scales[r];
}

template <class T, int R>
void multiply_rows(const AdapterArgs& a, const typename T::type* tiles, int64_t stride,
                   const Rows& rows, const float* scales, int64_t first) {
  int32_t n = 0;
  for (; n + TOKENS_AT_ONCE <= rows.count; n += TOKENS_AT_ONCE)
    multiply<T, R, TOKENS_AT_ONCE>(a, tiles, stride, rows, n, scales, first);
  for (; n < rows.count; n++) multiply<T, R, 1>(a, tiles, stride, rows, n, scales, first);
}

template <class T>
void shrink_block(const AdapterArgs& a, const Rows& tokens, const AdapterPair& pair, int64_t block) {
  int64_t first = block * RANKS, rows = std::min((int64_t)RANKS, pair.rank - first);
  int64_t padded = (a.inputs + TILE - 1) / TILE * TILE, stride = rows * TILE;
  const typename T::type* tiles = (const typename T::type*)pair.down + first * padded;
  const float* scales = pair.scales + first;
  if (rows == RANKS) return multiply_rows<T, RANKS>(a, tiles, stride, tokens, scales, first);
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4)
    multiply_rows<T, 4>(a, tiles + r * TILE, stride, tokens, scales + r, first + r);
  for (; r < rows; r++)
    multiply_rows<T, 1>(a, tiles + r * TILE, stride, tokens, scales + r, first + r);
}

void shrink_rows(const AdapterArgs& a, const AdapterPair& pair, int64_t block, const int32_t* from,
                 const int32_t* to, int32_t count) {
  const Rows rows{from, to, count};
  if (pair.type == ADAPTER_BF16) return shrink_block<Bf16>(a, rows, pair, block);
  if (pair.type == ADAPTER_FP16) return shrink_block<Fp16>(a, rows, pair, block);
  if (pair.type == ADAPTER_INT8) return shrink_block<Int8>(a, rows, pair, block);
  return shrink_block<Fp32>(a, rows, pair, block);
}

// f(the part's tiles of these outputs, the first of them, how many, part) of each part with any.
template <class T, class F>
void each_part(const AdapterPair& pair, int64_t begin, int64_t end, F f) {
  const typename T::type* up = (const typename T::type*)pair.up;
  for (const AdapterPair::Part& part : pair.parts) {
    if (!part.rank) return;
    int64_t first = std::max(begin, part.first_tile);
    int64_t last = std::min(end, part.first_tile + part.tiles);
    if (first < last) f(up + (first - part.first_tile) * part.rank * TILE, first, last - first, part);
    up += part.tiles * part.rank * TILE;
  }
}

// N tokens that follow each other and have one adapter, and a tile of a part of it.
template <class T, int N>
void add_tile_to(const AdapterArgs& a, const typename T::type* up, int64_t rank, const float* inner,
                 int64_t tile, float* out) {
  vf sums[N][VECTORS] = {};
  for (int64_t at = 0; at < rank * TILE * (int64_t)sizeof *up; at += LINE)
    __builtin_prefetch((const uint8_t*)up + AHEAD + at);
  for (int64_t r = 0; r < rank; r++)
    for (int v = 0; v < VECTORS; v++) {
      vf w = T::get(up + r * TILE + v * LANES);
      for (int n = 0; n < N; n++) sums[n][v] = fma(splat(inner[n * a.width + r]), w, sums[n][v]);
    }
  int64_t left = a.outputs - tile * TILE;
  for (int n = 0; n < N; n++)
    for (int v = 0; v < VECTORS; v++) {
      int64_t at = v * LANES;
      float* to = out + n * a.out_stride + at;
      if (at + LANES <= left)
        store(to, load(to) + sums[n][v]);
      else if (at < left)
        store_some(to, load_some(to, (int)(left - at)) + sums[n][v], (int)(left - at));
    }
}

// A part's tiles one after the other, as they lie: what the memory is quickest with.
template <class T, int N>
void expand_rows(const AdapterArgs& a, const AdapterPair& pair, int64_t begin, int64_t end,
                 int64_t row) {
  each_part<T>(pair, begin, end,
               [&](const typename T::type* up, int64_t tile, int64_t count,
                   const AdapterPair::Part& part) {
    const float* inner = a.inner + row * a.width + part.first_rank;
    float* out = a.out + row * a.out_stride;
    for (int64_t k = 0; k < count; k++, up += part.rank * TILE)
      add_tile_to<T, N>(a, up, part.rank, inner, tile + k, out + (tile + k) * TILE);
  });
}

template <class T>
int64_t expand_some(const AdapterArgs& a, const AdapterPair& pair, int64_t begin, int64_t end,
                    int64_t row, int64_t count) {
  if (count >= ROWS_AT_ONCE) {
    expand_rows<T, ROWS_AT_ONCE>(a, pair, begin, end, row);
    return ROWS_AT_ONCE;
  }
  expand_rows<T, 1>(a, pair, begin, end, row);
  return 1;
}

void expand(const AdapterArgs& a, int64_t begin, int64_t end, int64_t first, int64_t last) {
  for (int64_t row = first; row < last;) {
    int32_t number = a.numbers[row];
    int64_t same = row + 1;
    while (same < last && same < row + ROWS_AT_ONCE && a.numbers[same] == number) same++;
    const AdapterPair& pair = a.table[number];
    int64_t count = same - row;
    if (!pair.rank) row = same;
    else if (pair.type == ADAPTER_BF16) row += expand_some<Bf16>(a, pair, begin, end, row, count);
    else if (pair.type == ADAPTER_FP16) row += expand_some<Fp16>(a, pair, begin, end, row, count);
    else if (pair.type >= ADAPTER_INT8) row += expand_some<Int8>(a, pair, begin, end, row, count);
    else row += expand_some<Fp32>(a, pair, begin, end, row, count);
  }
}

template <class T>
void add_tile(const AdapterPair& pair, int part, int64_t tile, const float* inner, float* out) {
  const AdapterPair::Part& own = pair.parts[part];
  const typename T::type* up = (const typename T::type*)pair.up + tile * own.rank * TILE;
  for (int before = 0; before < part; before++)
    up += pair.parts[before].tiles * pair.parts[before].rank * TILE;
  inner += own.first_rank;
  vf sums[VECTORS] = {};
  for (int64_t r = 0; r < own.rank; r++)
    for (int v = 0; v < VECTORS; v++)
      sums[v] = fma(splat(inner[r]), T::get(up + r * TILE + v * LANES), sums[v]);
  for (int v = 0; v < VECTORS; v++) store(out + v * LANES, load(out + v * LANES) + sums[v]);
}

void expand_tile(const AdapterPair& pair, int part, int64_t tile, const float* inner, float* out) {
  if (pair.type == ADAPTER_BF16) return add_tile<Bf16>(pair, part, tile, inner, out);
  if (pair.type == ADAPTER_FP16) return add_tile<Fp16>(pair, part, tile, inner, out);
  if (pair.type == ADAPTER_INT8) return add_tile<Int8>(pair, part, tile, inner, out);
  return add_tile<Fp32>(pair, part, tile, inner, out);
}

}  // namespace

extern const AdapterKernels BN_TABLE = {expand, shrink_rows, expand_tile};

}  // namespace banyan
