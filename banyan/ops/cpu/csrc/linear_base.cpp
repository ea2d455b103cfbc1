// Projections in plain C++: what every machine can run, and what the others are checked against.
#include "linear.h"
#include "vec.h"
#include "linear_panel.inl"
#include "linear_quantize.inl"

namespace banyan {
namespace {

constexpr int ROWS = 1, UNPACKED_ROWS = 1;
constexpr int direct_rows(Format) { return 0; }
constexpr int next_rows(int) { return 1; }

template <FormatId F>
struct Tile {
  const uint8_t* tile;
};
template <FormatId F>
struct Unpacked {
  const Panel* panel;
  const uint8_t* next;
};

template <FormatId F>
void unpack(const Tile<F>& tiles, int64_t blocks, Panel& panel) {
  constexpr Format f = FORMATS[F];
  for (int64_t b = 0; b < blocks; b++) {
    const uint8_t* tile = tiles.tile + b * f.tile_bytes();
    const uint8_t *low = tile + f.low_at(), *high = tile + f.high_at();
    for (int p = 0; p < f.parts(); p++)
      for (int i = 0; i < GROUP; i++) {
        uint16_t scale, minimum = 0;
        std::memcpy(&scale, tile + (p * GROUP + i) * 2, 2);
        if (f.has_min) std::memcpy(&minimum, tile + f.scale_bytes() + (p * GROUP + i) * 2, 2);
        panel.scales[b][p][i] = from_fp16(scale);
        panel.minima[b][p][i] = from_fp16(minimum);
      }
    for (int g = 0; g < 8; g++)
      for (int i = 0; i < 64; i++) {
        int q = f.bits == 8 ? low[g * 64 + i] : low[g / 2 * 64 + i] >> (g % 2 * 4) & 15;
        if (f.bits == 5) q |= (high[i] >> g & 1) << 4;
        if (f.bits == 6) q |= (high[g / 4 * 64 + i] >> (g % 4 * 2) & 3) << 4;
        panel.q[b][g][i] = (uint8_t)f.number(q);
      }
  }
}

template <class Source, int R>
struct Multiply;
template <FormatId F, int R>
struct Multiply<Unpacked<F>, R> {
  static void run(const Unpacked<F>& w, int64_t blocks, const Rows& rows, int64_t row, float* acc) {
    constexpr Format f = FORMATS[F];
    constexpr int GROUPS = 8 / f.parts();
    const int8_t* x = (const int8_t*)rows.values(row);
    const float *scales = rows.scales(row), *scaled = rows.scaled_sums(row);
    const int16_t* sums = rows.sums(row);
    for (int64_t b = 0; b < blocks; b++)
      for (int p = 0; p < f.parts(); p++) {
        int32_t half = sums[2 * b + p], whole = sums[2 * b] + sums[2 * b + 1];
        float x_sum = f.has_halves ? scales[b] * (float)half : scaled[b];
        for (int i = 0; i < GROUP; i++) {
          int32_t sum = -f.offset * (f.has_halves ? half : whole);
          for (int g = p * GROUPS; g < (p + 1) * GROUPS; g++)
            for (int j = 0; j < 4; j++)
              sum += w.panel->q[b][g][i * 4 + j] * x[b * BLOCK + g * 4 + j];
          acc[i] += (float)sum * (w.panel->scales[b][p][i] * scales[b]);
          if (f.has_min) acc[i] += w.panel->minima[b][p][i] * x_sum;
        }
      }
  }
};
template <FormatId F, int R>  // direct_rows is 0
struct Multiply<Tile<F>, R> {
  static void run(const Tile<F>&, int64_t, const Rows&, int64_t, float*) {}
};
template <class Source, int R>
inline void multiply(const Source& w, int64_t blocks, const Rows& rows, int64_t row, float* acc) {
  Multiply<Source, R>::run(w, blocks, rows, row, acc);
}

}  // namespace
}  // namespace banyan

#include "linear.inl"

namespace banyan {
namespace {

void round_pairs(const float* x, int64_t k, uint8_t* out) {
  for (int64_t i = 0; i < blocks_of(k) * BLOCK; i++)
    ((uint16_t*)out)[i] = i < k ? to_bf16(x[i]) : (uint16_t)0;
}

// What vdpbf16ps and tiles are checked against, which add in orders of their own.
void pairs_unit(const LinearArgs& args, int64_t group, int64_t begin, int64_t end, uint8_t*) {
  const uint16_t* w = (const uint16_t*)(args.tiles + group * group_bytes(BF16_PAIRS, args.k));
  for (int64_t row = begin; row < end; row++) {
    const uint16_t* x = (const uint16_t*)(args.x + row * args.x_bytes);
    float acc[GROUP] = {};
    for (int64_t k = 0; k < args.k; k++)
      for (int i = 0; i < GROUP; i++)
        acc[i] += from_bf16(x[k]) * from_bf16(w[(k / 2 * GROUP + i) * 2 + k % 2]);
    finish(args, group, row, acc);
  }
}

}  // namespace
const LinearKernels linear_base = BN_LINEAR_KERNELS(round_pairs, pairs_unit, 1, {}, {});
}
