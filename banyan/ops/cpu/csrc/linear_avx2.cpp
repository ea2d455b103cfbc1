// Projections with vpmaddubsw: unsigned weights times signed activations, pairs added in 16 bits.
//
// The pair sums of 4-bit weights may be added in 16 bits over a whole block (15 * 127 * 2 * 8 =
// 30,480), those of 5 bits over half of it (31,496), those of 6 bits over two vectors (32,004), those
// of 7 bits over one (32,258); levels as numbers of their largest's bits.
// 8 bits do not fit: there the weight's sign moves to the activation, |w| * sign(x, w), and a pair is
// at most 128 * 127 * 2 = 32,512.
#include "linear.h"
#include "vec.h"
#include "linear_panel.inl"
#include "linear_quantize.inl"

#define UNROLL _Pragma("GCC unroll 16")

namespace banyan {
namespace {

constexpr int ROWS = 4, UNPACKED_ROWS = 3;
// Bringing 5 or 6 bits to bytes costs more than writing and reading a panel.
constexpr int direct_rows(Format f) { return f.bits == 4 || f.bits == 8 ? 16 : ROWS; }
constexpr int next_rows(int rows) { return rows - 1; }
constexpr int PREFETCH = 4096;  // bytes ahead of where a group is read straight from memory

inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

// Weights straight from memory.
template <FormatId F>
struct Tile {
  static constexpr Format f = FORMATS[F];
  static constexpr FormatId format = F;
  static constexpr int BYTES = f.tile_bytes(), LOW = f.low_at(), HIGH = f.high_at();
  const uint8_t* tile;

  Tile at(int64_t block) const { return {tile + block * BYTES}; }
  void prefetch() const {
    UNROLL for (int i = 0; i < BYTES; i += 64)
        _mm_prefetch((const char*)tile + PREFETCH + i, _MM_HINT_T0);
  }
  // Outputs 8 * half ... of vector g. [8 outputs][4 inputs] u8
  __m256i weights(int g, int half) const {
    const __m256i low_bits = _mm256_set1_epi8(15);
    const uint8_t* low = tile + LOW + half * 32;
    const uint8_t* high = tile + HIGH + half * 32;
    if (f.bits == 8) return load_bytes(low + g * 64);
    __m256i q = load_bytes(low + g / 2 * 64);
    q = _mm256_and_si256(g % 2 ? _mm256_srli_epi16(q, 4) : q, low_bits);
    if (f.levels)
      q = _mm256_shuffle_epi8(
          _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)f.levels)), q);
    if (f.bits == 5) {
      __m256i h = load_bytes(high);
      h = g <= 4 ? _mm256_slli_epi16(h, g <= 4 ? 4 - g : 0)
                 : _mm256_srli_epi16(h, g > 4 ? g - 4 : 0);
      q = _mm256_or_si256(q, _mm256_and_si256(h, _mm256_set1_epi8(16)));
    }
    if (f.bits == 6) {
      __m256i h = load_bytes(high + g / 4 * 64);
      int place = g % 4 * 2;
      h = place <= 4 ? _mm256_slli_epi16(h, place <= 4 ? 4 - place : 0) : _mm256_srli_epi16(h, 2);
      q = _mm256_or_si256(q, _mm256_and_si256(h, _mm256_set1_epi8(48)));
    }
    return q;
  }
  __m256 scale(int part, int half) const {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(tile + part * 32 + half * 16)));
  }
  __m256 minimum(int part, int half) const {
    const uint8_t* minima = tile + f.scale_bytes();
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(minima + part * 32 + half * 16)));
  }
};

// Weights that lie in a panel.
template <FormatId F>
struct Unpacked {
  static constexpr FormatId format = F;
  const Panel* panel;
  const uint8_t* next;  // the tiles that the panel will hold next, to be fetched; or null
  int64_t block = 0;

  Unpacked at(int64_t b) const { return {panel, next, b}; }
  void prefetch() const {
    constexpr int BYTES = FORMATS[F].tile_bytes();
    if (!next) return;
    UNROLL for (int i = 0; i < BYTES; i += 64)
        _mm_prefetch((const char*)next + block * BYTES + i, _MM_HINT_T0);
  }
  __m256i weights(int g, int half) const { return load_bytes(panel->q[block][g] + half * 32); }
  __m256 scale(int part, int half) const {
    return _mm256_load_ps(panel->scales[block][part] + half * 8);
  }
  __m256 minimum(int part, int half) const {
    return _mm256_load_ps(panel->minima[block][part] + half * 8);
  }
};

template <FormatId F>
void unpack(const Tile<F>& tiles, int64_t blocks, Panel& panel) {
  constexpr Format f = FORMATS[F];
  constexpr int PARTS = f.parts();
  for (int64_t b = 0; b < blocks; b++) {
    const Tile<F> tile = tiles.at(b);
    UNROLL for (int half = 0; half < 2; half++) {
      UNROLL for (int g = 0; g < 8; g++)
          _mm256_store_si256((__m256i*)(panel.q[b][g] + half * 32), tile.weights(g, half));
      UNROLL for (int p = 0; p < PARTS; p++) {
        _mm256_store_ps(panel.scales[b][p] + half * 8, tile.scale(p, half));
        if (f.has_min) _mm256_store_ps(panel.minima[b][p] + half * 8, tile.minimum(p, half));
      }
    }
  }
}

// Makes a compiler add here and now: reordered sums need more registers than there are.
inline void keep(__m256i& v) { asm("" : "+x"(v)); }

inline __m256i broadcast(const void* p) { return _mm256_set1_epi32(word(p)); }

// sums[r][half] = products over vectors [first, first + COUNT), exact. x: the rows at this block.
template <int WIDTH, int COUNT, int R, class Source>
inline __attribute__((always_inline)) void dot(const Source& w, int first, const uint8_t* const* x,
                                               __m256i (&sums)[R][2]) {
  const __m256i ones = _mm256_set1_epi16(1);
  constexpr int STEP = WIDTH == 4 ? 8 : WIDTH == 5 ? 4 : WIDTH == 6 ? 2 : 1;
  constexpr int LENGTH = STEP < COUNT ? STEP : COUNT;
  UNROLL for (int start = 0; start < COUNT; start += LENGTH) {
    __m256i pairs[R][2];
    UNROLL for (int j = 0; j < LENGTH; j++) {
      const int g = first + start + j;
      __m256i v[2], size[2];
      UNROLL for (int h = 0; h < 2; h++) {
        v[h] = w.weights(g, h);
        if (WIDTH == 8) {
          v[h] = _mm256_xor_si256(v[h], _mm256_set1_epi8((char)0x80));
          size[h] = _mm256_abs_epi8(v[h]);
        }
      }
      UNROLL for (int r = 0; r < R; r++) {
        const __m256i four = broadcast(x[r] + 4 * g);
        UNROLL for (int h = 0; h < 2; h++) {
          __m256i product = WIDTH == 8
                                ? _mm256_maddubs_epi16(size[h], _mm256_sign_epi8(four, v[h]))
                                : _mm256_maddubs_epi16(v[h], four);
          pairs[r][h] = j ? _mm256_add_epi16(pairs[r][h], product) : product;
          keep(pairs[r][h]);
        }
      }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < 2; h++) {
      __m256i wide = _mm256_madd_epi16(pairs[r][h], ones);
      sums[r][h] = start ? _mm256_add_epi32(sums[r][h], wide) : wide;
    }
  }
}

template <class Source, int R>
inline void multiply(const Source& source, int64_t blocks, const Rows& rows, int64_t row,
                     float* acc) {
  constexpr Format f = FORMATS[Source::format];
  constexpr int PARTS = f.parts(), OFFSET = f.width() == 8 ? 0 : f.offset;
  __m256 total[R][2];
  const uint8_t* x[R];
  UNROLL for (int r = 0; r < R; r++) {
    x[r] = rows.values(row + r);
    UNROLL for (int h = 0; h < 2; h++) total[r][h] = _mm256_loadu_ps(acc + r * GROUP + h * 8);
  }
  // The three arrays behind the values, from the values on.
  const int64_t scales_at = (rows.blocks - rows.block) * 32 + rows.block * 4;
  const int64_t array = rows.blocks * 4;
  for (int64_t b = 0; b < blocks; b++) {
    const Source w = source.at(b);
    w.prefetch();
    const int64_t here = scales_at + b * 4 - b * 32;  // x moves on by a block
    UNROLL for (int p = 0; p < PARTS; p++) {
      __m256i sums[R][2];
      dot<f.width(), 8 / PARTS, R>(w, p * 8 / PARTS, x, sums);
      const __m256i pick = _mm256_set1_epi32(PARTS == 1 ? 0x10001 : p ? 0x10000 : 1);
      UNROLL for (int r = 0; r < R; r++) {
        const uint8_t* scales = x[r] + here;
        const __m256 scale = _mm256_broadcast_ss((const float*)scales);
        if (OFFSET) {
          const __m256i off = _mm256_mullo_epi16(pick, _mm256_set1_epi16(-OFFSET));
          const __m256i start = _mm256_madd_epi16(broadcast(scales + 2 * array), off);
          UNROLL for (int h = 0; h < 2; h++) sums[r][h] = _mm256_add_epi32(sums[r][h], start);
        }
        UNROLL for (int h = 0; h < 2; h++)
            total[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][h]),
                                          _mm256_mul_ps(w.scale(p, h), scale), total[r][h]);
        if (f.has_min) {
          __m256 x_sum = _mm256_broadcast_ss((const float*)(scales + array));
          if (PARTS == 2)
            x_sum = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_madd_epi16(
                                             broadcast(scales + 2 * array), pick)));
          UNROLL for (int h = 0; h < 2; h++)
              total[r][h] = _mm256_fmadd_ps(w.minimum(p, h), x_sum, total[r][h]);
        }
      }
    }
    UNROLL for (int r = 0; r < R; r++) x[r] += BLOCK;
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < 2; h++)
      _mm256_storeu_ps(acc + r * GROUP + h * 8, total[r][h]);
}

}  // namespace
}  // namespace banyan

#include "linear.inl"

namespace banyan {
const LinearKernels linear_avx2 = BN_LINEAR_KERNELS(nullptr, nullptr, 1, {}, {});
}
