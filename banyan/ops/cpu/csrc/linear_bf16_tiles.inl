// Products of bf16 with tile registers: 16 rows x 32 inputs times 32 inputs x 16 outputs in one
// instruction. Included after linear.inl.
//
// A (row, output) is one sum, from zero, blocks of 32 inputs in rising order. Within a block the even
// inputs are one sum from zero and the odd ones another, each product fused; these are added, and what
// comes out is added to the sum. Rows of a tile see nothing of each other, and a row alone goes by
// tiles too, so its bits are the same in any company. Numbers below the smallest normal one count as
// zero, whether read or made, whatever the thread's mode.
#include <algorithm>
#include <array>
#include <utility>

#include "linear_pairs.inl"

namespace banyan {
namespace {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_BYTES = 1024;  // 16 rows of 64: activations, weights, sums
constexpr int64_t TILE_FLOATS = TILE_BYTES / 4;
// All rows go through so many blocks of two groups before the next ones.
constexpr int64_t PANEL_TILES = 32;
static_assert((PANEL_ROWS / TILE_ROWS + 1) * PAIR_GROUPS * TILE_BYTES <= LINEAR_SCRATCH);

// How the registers are shaped, as ldtilecfg reads it: 0-3 sums, 4-5 activations, 6-7 weights. Fewer
// than 16 rows are a tile alone, which has no use for the others.
struct alignas(64) PairShape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  constexpr explicit PairShape(int64_t count) {
    rows[0] = rows[1] = rows[4] = (uint8_t)count;
  }
};
// By rows of a tile; static, as the compiler does not see that the instruction reads all of it.
template <size_t... ROWS>
constexpr std::array<PairShape, sizeof...(ROWS)> pair_shapes(std::index_sequence<ROWS...>) {
  return {PairShape(ROWS + 1)...};
}
constexpr auto PAIR_SHAPES = pair_shapes(std::make_index_sequence<TILE_ROWS>());

// Weights of `count` blocks, of groups `stride` apart, whose inputs lie `at` bytes from where rows begin.
// Meanwhile lines [first, last) of blocks at `ahead` are fetched, unless that is null.
struct PairBlocks {
  const uint8_t *tiles, *ahead;
  int64_t stride, count, at, first, last;
};

// sums [R][N] tiles, rows of them `sums_floats` apart, += products of R times 16 rows with N groups.
template <int R, int N>
inline void multiply_tiles(const PairBlocks& blocks, const uint8_t* const (&x)[2], int64_t x_bytes,
                           float* sums, int64_t sums_floats) {
  float *sums2 = sums + sums_floats, *next = sums + TILE_FLOATS, *next2 = sums2 + TILE_FLOATS;
  if (blocks.at == 0) {
    _tile_zero(0);
    if constexpr (N == 2) _tile_zero(1);
    if constexpr (R == 2) _tile_zero(2);
    if constexpr (R == 2 && N == 2) _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    if constexpr (N == 2) _tile_loadd(1, next, 64);
    if constexpr (R == 2) _tile_loadd(2, sums2, 64);
    if constexpr (R == 2 && N == 2) _tile_loadd(3, next2, 64);
  }
  const uint8_t *w = blocks.tiles, *ahead = blocks.ahead;
  const int64_t end = blocks.at + blocks.count * 64;
  for (int64_t at = blocks.at; at < end; at += 64, w += TILE_BYTES) {
    _tile_loadd(4, x[0] + at, x_bytes);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) {
      _tile_loadd(7, w + blocks.stride, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R == 2) {
      _tile_loadd(5, x[1] + at, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);
    }
    if (!ahead) continue;
    for (int64_t line = blocks.first; line < blocks.last; line++)
      for (int n = 0; n < N; n++)
        _mm_prefetch((const char*)ahead + n * blocks.stride + line * 64, _MM_HINT_T1);
    ahead += TILE_BYTES;
  }
  _tile_stored(0, sums, 64);
  if constexpr (N == 2) _tile_stored(1, next, 64);
  if constexpr (R == 2) _tile_stored(2, sums2, 64);
  if constexpr (R == 2 && N == 2) _tile_stored(3, next2, 64);
}

// Rows of a unit in tiles of 16; the last tile ends with the last row, and repeats some of the one
// before it where rows are no multiple of 16. sums: [row tile][N] tiles.
template <int N>
struct TiledRows {
  static constexpr int AT_ONCE = N == 1 ? 1 : 2;  // groups
  const LinearArgs& args;
  int64_t group, begin, count;
  float* sums;

  int64_t tiles() const { return (count + TILE_ROWS - 1) / TILE_ROWS; }
  int64_t of_tile() const { return std::min(count, TILE_ROWS); }
  int64_t row(int64_t tile) const {
    return begin + std::min(tile * TILE_ROWS, count - of_tile());
  }
  float* sums_of(int64_t tile, int n) const { return sums + (tile * N + n) * TILE_FLOATS; }

  // Two tiles of rows at a time through blocks of groups n, n + 1, each fetching its share ahead.
  void multiply(PairBlocks blocks, int n, bool is_last) const {
    const int64_t shares = (tiles() + 1) / 2;
    for (int64_t tile = 0; tile < tiles(); tile += 2) {
      const bool has_second = tile + 1 < tiles();
      const int64_t share = tile / 2, first = row(tile), second = row(tile + has_second);
      blocks.first = share * 16 / shares, blocks.last = (share + 1) * 16 / shares;
      for (int g = n; g < n + AT_ONCE && is_last; g++) {
        fetch_outputs(args, group + g, first, first + of_tile());
        if (has_second) fetch_outputs(args, group + g, second, second + of_tile());
      }
      const uint8_t* x[2] = {args.x + first * args.x_bytes, args.x + second * args.x_bytes};
      (has_second ? multiply_tiles<2, AT_ONCE> : multiply_tiles<1, AT_ONCE>)(
          blocks, x, args.x_bytes, sums_of(tile, n), N * TILE_FLOATS);
      for (int64_t t = tile; t <= tile + has_second && is_last; t++)
        for (int64_t r = 0; r < of_tile(); r++)
          for (int g = n; g < n + AT_ONCE; g++)
            finish(args, group + g, row(t) + r, sums_of(t, g) + r * GROUP);
    }
  }
};

// N groups of outputs, from `group` on.
template <int N>
void tiles_unit(const LinearArgs& args, int64_t group, int64_t begin, int64_t end,
                uint8_t* scratch) {
  const TiledRows<N> rows{args, group, begin, end - begin, (float*)scratch};
  const int64_t stride = pairs_of(args.k) * 64, whole = args.k / BLOCK * TILE_BYTES;
  const uint8_t* tiles = args.tiles + group * stride;
  // Inputs that are no whole block: weights with zeros behind, as the activations have them.
  uint8_t* rest = (uint8_t*)rows.sums_of(rows.tiles(), 0);
  const bool has_rest = whole < stride;
  for (int n = 0; n < N && has_rest; n++) {
    std::memset(rest + n * TILE_BYTES, 0, TILE_BYTES);
    std::memcpy(rest + n * TILE_BYTES, tiles + n * stride + whole, stride - whole);
  }
  asm volatile("" ::: "memory");  // what follows is not seen to read what was stored before
  _tile_loadconfig(&PAIR_SHAPES[rows.of_tile() - 1]);
  const int64_t blocks = args.k / BLOCK;
  // Few rows go through all blocks at once, and fetch what lies so far ahead of them.
  const bool is_few = rows.tiles() <= 2;
  const int64_t panels = is_few ? blocks > 0 : (blocks + PANEL_TILES - 1) / PANEL_TILES;
  for (int64_t p = 0; p < panels; p++) {
    const int64_t from = blocks * p / panels, to = blocks * (p + 1) / panels;
    const bool is_last = p == panels - 1;
    for (int n = 0; n < N; n += 2) {
      const uint8_t* here = tiles + n * stride + from * TILE_BYTES;
      const uint8_t* next = n + 2 < N  ? here + 2 * stride
                            : is_last ? tiles + N * stride
                                      : tiles + to * TILE_BYTES;
      rows.multiply({here, is_few ? here + PREFETCH : next, stride, to - from, from * 64, 0, 0}, n,
                    is_last && !has_rest);
    }
  }
  for (int n = 0; n < N && has_rest; n += 2)
    rows.multiply({rest + n * TILE_BYTES, nullptr, TILE_BYTES, 1, blocks * 64, 0, 0}, n, true);
  _tile_release();
}

}  // namespace
}  // namespace banyan
