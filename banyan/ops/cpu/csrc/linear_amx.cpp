// Projections with tile registers: 16 rows x 32 inputs times 32 inputs x 16 outputs in one
// instruction. Scales per block mean one result tile per block, so few rows go by vectors instead.
#include "linear.h"
#include "vec.h"
#include "linear_panel.inl"
#include "linear_quantize.inl"
#include "linear_vnni.inl"

namespace banyan {
namespace {

constexpr int direct_rows(Format) { return ROWS; }
constexpr int UNPACKED_ROWS = 16;

// How the tile registers are shaped: 0, 1 results [16][16] int32; 2, 3 activations [16][INPUTS];
// 4, 5 weights [INPUTS / 4][16][4]. 64 bytes, as ldtilecfg reads them.
template <int INPUTS>
struct alignas(64) Shape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, INPUTS, INPUTS, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, INPUTS / 4, INPUTS / 4};
};
template <int INPUTS>
constexpr Shape<INPUTS> SHAPE{};

// acc += products of 16 rows with a panel. The integers are those of vpdpbusd, what follows too.
template <FormatId F>
inline void multiply_tiles(const Bytes<F>& source, int64_t blocks, const Rows& rows, int64_t row,
                           float* acc) {
  constexpr int PARTS = FORMATS[F].parts(), INPUTS = BLOCK / PARTS, STEPS = 2 / PARTS;
  alignas(64) int32_t sums[2][16][GROUP];
  asm volatile("" ::: "memory");  // the loads below are not seen to read what was stored before
  _tile_loadconfig(&SHAPE<INPUTS>);
  const int64_t scales_at = (rows.blocks - rows.block) * 32 + rows.block * 4;
  const int64_t array = rows.blocks * 4;
  const uint8_t* x = rows.values(row);
  // Two tiles at a time: two blocks, or the two parts of one.
  for (int64_t b = 0; b < blocks; b += STEPS) {
    bool has_second = PARTS == 2 || b + 1 < blocks;
    const uint8_t* q = source.panel->q[b][0];
    const uint8_t* at = x + b * BLOCK;
    _tile_zero(0);
    _tile_loadd(2, at, rows.bytes);
    _tile_loadd(4, q, 64);
    _tile_dpbsud(0, 2, 4);
    _tile_stored(0, sums[0], 64);
    if (has_second) {
      _tile_zero(1);
      _tile_loadd(3, at + INPUTS, rows.bytes);
      _tile_loadd(5, q + INPUTS * GROUP, 64);
      _tile_dpbsud(1, 3, 5);
      _tile_stored(1, sums[1], 64);
    }
    for (int t = 0; t < (has_second ? 2 : 1); t++) {
      const int part = PARTS == 2 ? t : 0;
      const int64_t block = PARTS == 2 ? b : b + t;
      const Bytes<F> w = source.at(block);
      for (int r = 0; r < 16; r++) {
        const uint8_t* here = x + r * rows.bytes + block * BLOCK;
        const int64_t to_scale = scales_at + block * 4 - block * 32;
        __m512i sum = _mm512_add_epi32(_mm512_load_si512(sums[t][r]),
                                       start_of(w, part, here, to_scale, array));
        __m512 total = _mm512_loadu_ps(acc + r * GROUP);
        _mm512_storeu_ps(acc + r * GROUP,
                         add_part(w, part, sum, here, to_scale, array, total));
      }
    }
  }
  _tile_release();
}

template <class Source, int R>
inline void multiply(const Source& source, int64_t blocks, const Rows& rows, int64_t row,
                     float* acc) {
  if constexpr (R == 16)
    multiply_tiles<Source::format>(source, blocks, rows, row, acc);
  else
    multiply_vnni<Source, R>(source, blocks, rows, row, acc);
}

}  // namespace
}  // namespace banyan

#include "linear.inl"
#include "linear_wide.inl"
#include "linear_bf16_tiles.inl"

namespace banyan {
template <FormatId>
constexpr LinearUnit NONE = nullptr;  // a tile is one group
static_assert(WIDE_GROUPS == PAIR_GROUPS, "one number of groups for all formats");
const LinearKernels linear_amx = BN_LINEAR_KERNELS(
    round_pairs, tiles_unit<1>, PAIR_GROUPS, BN_OF_ROUNDED(NONE, tiles_unit<PAIR_GROUPS>),
    BN_OF_WIDE(wide_unit));
}
