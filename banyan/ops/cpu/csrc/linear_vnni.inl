// Products of 16 outputs x 4 inputs by vpdpbusd, for the files that have it.
#include <immintrin.h>

#define UNROLL _Pragma("GCC unroll 16")

namespace banyan {
namespace {

constexpr int ROWS = 8;
constexpr int UNPACKED_ROWS = ROWS;
// Bringing weights to bytes goes beside vpdpbusd on other ports; writing a panel of them does not.
constexpr int direct_rows(Format) { return PANEL_ROWS; }
// Three go together: twice through a group takes longer than once with a fourth row.
constexpr int next_rows(int rows) { return rows > 4 ? 4 : rows - 1; }
constexpr int PREFETCH = 4096;  // bytes ahead of where a group is read straight from memory

// Weights straight from memory.
template <FormatId F>
struct Tile {
  static constexpr Format f = FORMATS[F];
  static constexpr FormatId format = F;
  static constexpr int BYTES = f.tile_bytes(), LOW = f.low_at(), HIGH = f.high_at();
  const uint8_t* tile;

  Tile at(int64_t block) const { return {tile + block * BYTES}; }
  static constexpr int32_t offset() { return f.offset; }
  void prefetch() const {
    UNROLL for (int i = 0; i < BYTES; i += 64)
        _mm_prefetch((const char*)tile + PREFETCH + i, _MM_HINT_T0);
  }
  // Vector g. [16 outputs][4 inputs] u8
  __m512i weights(int g) const {
    if (f.bits == 8) return _mm512_loadu_si512(tile + LOW + g * 64);
    __m512i q = _mm512_loadu_si512(tile + LOW + g / 2 * 64);
    q = _mm512_and_si512(g % 2 ? _mm512_srli_epi16(q, 4) : q, _mm512_set1_epi8(15));
    if (f.levels)
      q = _mm512_shuffle_epi8(
          _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)f.levels)), q);
    if (f.bits == 5) {
      __m512i h = _mm512_loadu_si512(tile + HIGH);
      h = g <= 4 ? _mm512_slli_epi16(h, g <= 4 ? 4 - g : 0)
                 : _mm512_srli_epi16(h, g > 4 ? g - 4 : 0);
      q = _mm512_or_si512(q, _mm512_and_si512(h, _mm512_set1_epi8(16)));
    }
    if (f.bits == 6) {
      __m512i h = _mm512_loadu_si512(tile + HIGH + g / 4 * 64);
      int place = g % 4 * 2;
      h = place <= 4 ? _mm512_slli_epi16(h, place <= 4 ? 4 - place : 0) : _mm512_srli_epi16(h, 2);
      q = _mm512_or_si512(q, _mm512_and_si512(h, _mm512_set1_epi8(48)));
    }
    return q;
  }
  __m512 scale(int part) const {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(tile + part * 32)));
  }
  __m512 minimum(int part) const {
    return _mm512_cvtph_ps(
        _mm256_loadu_si256((const __m256i*)(tile + f.scale_bytes() + part * 32)));
  }
};

// Weights that lie in a panel. Once they are bytes, formats differ in what stands beside them alone.
constexpr FormatId like(FormatId format) {
  constexpr FormatId same[] = {W4, W4_MIN, W4_HALVES, W4_MIN_HALVES};
  for (FormatId id : same)
    if (FORMATS[id].has_min == FORMATS[format].has_min &&
        FORMATS[id].has_halves == FORMATS[format].has_halves)
      return id;
  return format;
}
template <FormatId F>
struct Bytes {
  static constexpr FormatId format = F;
  const Panel* panel;
  const uint8_t* next;  // the tiles that the panel will hold next, to be fetched; or null
  int64_t block = 0;

  Bytes at(int64_t b) const { return {panel, next, b}; }
  int32_t offset() const { return FORMATS[F].offset ? panel->offset : 0; }
  void prefetch() const {
    if (!next) return;
    const int64_t bytes = panel->tile_bytes;
    for (int64_t i = 0; i < bytes; i += 64)
      _mm_prefetch((const char*)next + block * bytes + i, _MM_HINT_T0);
  }
  __m512i weights(int g) const { return _mm512_load_si512(panel->q[block][g]); }
  __m512 scale(int part) const { return _mm512_load_ps(panel->scales[block][part]); }
  __m512 minimum(int part) const { return _mm512_load_ps(panel->minima[block][part]); }
};
template <FormatId F>
using Unpacked = Bytes<like(F)>;

template <FormatId F>
void unpack(const Tile<F>& tiles, int64_t blocks, Panel& panel) {
  constexpr Format f = FORMATS[F];
  constexpr int PARTS = f.parts();
  panel.offset = f.offset;
  panel.tile_bytes = f.tile_bytes();
  for (int64_t b = 0; b < blocks; b++) {
    const Tile<F> tile = tiles.at(b);
    UNROLL for (int g = 0; g < 8; g++) _mm512_store_si512(panel.q[b][g], tile.weights(g));
    UNROLL for (int p = 0; p < PARTS; p++) {
      _mm512_store_ps(panel.scales[b][p], tile.scale(p));
      if (f.has_min) _mm512_store_ps(panel.minima[b][p], tile.minimum(p));
    }
  }
}

// Integer sums begin at the bits of 1.5 * 2^23: what is added to them is added to that number, so they
// need no conversion, and fma(sum, scale, lift) is the sum without it * scale, rounded once. Sums are
// below 2^20 in magnitude, and a lift is exact: scales come from fp16.
constexpr int32_t LIFT_BITS = 0x4b400000;
inline __m512 lift_of(__m512 scale) { return _mm512_mul_ps(scale, _mm512_set1_ps(-0x1.8p23f)); }

// Where the integer sums of a part begin: the lift, and -offset * sum of the activations, of which
// `sums` holds those of both halves.
inline __m512i lifted_start(int32_t offset, bool has_halves, int part, int32_t sums) {
  const int32_t low = -offset & 0xffff, high = (int32_t)((uint32_t)-offset << 16);
  const int32_t pick = !has_halves ? low | high : part ? high : low;
  return _mm512_dpwssd_epi32(_mm512_set1_epi32(LIFT_BITS), _mm512_set1_epi32(sums),
                             _mm512_set1_epi32(pick));
}
template <class Source>
inline __m512i start_of(const Source& w, int part, const uint8_t* x, int64_t here, int64_t array) {
  constexpr Format f = FORMATS[Source::format];
  if (!f.offset) return _mm512_set1_epi32(LIFT_BITS);
  const uint8_t* sums = x + here + 2 * array;
  if (f.has_halves) {  // one number needs no vector: the ports of vpdpbusd are what is short
    int16_t half;
    std::memcpy(&half, sums + 2 * part, 2);
    return _mm512_set1_epi32(LIFT_BITS - w.offset() * half);
  }
  return lifted_start(w.offset(), f.has_halves, part, word(sums));
}

// What follows the integers of one part: total = fma(sum * scale, x_scale, total) and the minimum.
// x: the row at this block; here: from there to its scale; array: bytes between the row's arrays.
template <bool HAS_MIN, bool HAS_HALVES>
inline __m512 add_lifted(__m512i sum, __m512 scale, __m512 lift, __m512 minimum, int part,
                         const uint8_t* x, int64_t array, __m512 total) {
  const __m512 x_scale = _mm512_set1_ps(*(const float*)x);
  total = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_castsi512_ps(sum), scale, lift), x_scale, total);
  if (HAS_MIN) {
    __m512 x_sum = _mm512_set1_ps(*(const float*)(x + array));
    if (HAS_HALVES) {
      const __m512i pick = _mm512_set1_epi32(part ? 0x10000 : 1);
      const __m512i sums = _mm512_set1_epi32(word(x + 2 * array));
      x_sum = _mm512_mul_ps(x_scale, _mm512_cvtepi32_ps(_mm512_madd_epi16(sums, pick)));
    }
    total = _mm512_fmadd_ps(minimum, x_sum, total);
  }
  return total;
}
template <class Source>
inline __m512 add_part(const Source& w, int part, __m512i sum, const uint8_t* x, int64_t here,
                       int64_t array, __m512 total) {
  constexpr Format f = FORMATS[Source::format];
  const __m512 scale = w.scale(part), minimum = f.has_min ? w.minimum(part) : scale;
  return add_lifted<f.has_min, f.has_halves>(sum, scale, lift_of(scale), minimum, part, x + here,
                                             array, total);
}

template <class Source, int R>
inline void multiply(const Source& source, int64_t blocks, const Rows& rows, int64_t row,
                     float* acc) {
  constexpr int PARTS = FORMATS[Source::format].parts(), VECTORS_OF_PART = 8 / PARTS;
  __m512 total[R];
  const uint8_t* x[R];
  UNROLL for (int r = 0; r < R; r++) {
    x[r] = rows.values(row + r);
    total[r] = _mm512_loadu_ps(acc + r * GROUP);
  }
  const int64_t scales_at = (rows.blocks - rows.block) * 32 + rows.block * 4;
  const int64_t array = rows.blocks * 4;
  for (int64_t b = 0; b < blocks; b++) {
    const Source w = source.at(b);
    w.prefetch();
    const int64_t here = scales_at + b * 4 - b * 32;  // x moves on by a block
    UNROLL for (int p = 0; p < PARTS; p++) {
      __m512i sums[R];
      UNROLL for (int r = 0; r < R; r++) sums[r] = start_of(w, p, x[r], here, array);
      UNROLL for (int j = 0; j < VECTORS_OF_PART; j++) {
        const int g = p * VECTORS_OF_PART + j;
        const __m512i v = w.weights(g);
        UNROLL for (int r = 0; r < R; r++)
            sums[r] = _mm512_dpbusd_epi32(sums[r], v, _mm512_set1_epi32(word(x[r] + 4 * g)));
      }
      UNROLL for (int r = 0; r < R; r++)
          total[r] = add_part(w, p, sums[r], x[r], here, array, total[r]);
    }
    UNROLL for (int r = 0; r < R; r++) x[r] += BLOCK;
  }
  UNROLL for (int r = 0; r < R; r++) _mm512_storeu_ps(acc + r * GROUP, total[r]);
}

#if defined(__AVX512F__)
// The two bytes of 2^-8 times a float of 8 bits as bf16, by its bits without the sign.
struct EighthBytes {
  alignas(64) uint8_t low[128] = {}, high[128] = {};

  constexpr EighthBytes() {
    for (int code = 0; code < 128; code++) {
      int exponent = code >> 3, part = code & 7;
      if (!exponent && part)  // subnormal: the highest bit is the one that floats leave out
        for (exponent = 1; part < 8; part *= 2) exponent--;
      int bits = code ? (exponent + 112) << 7 | (part & 7) << 4 : 0;
      low[code] = (uint8_t)bits;
      high[code] = (uint8_t)(bits >> 8);
    }
  }
};
constexpr EighthBytes EIGHTH_BYTES;

#ifndef BN_LOOKUP_TARGET
#define BN_LOOKUP_TARGET __attribute__((target("avx512vbmi")))
#endif
// What eighth_row of linear.inl does, with a table look-up in place of conversions.
BN_LOOKUP_TARGET inline void lookup_row(const uint8_t* tiles, int64_t count, const float* x,
                                        float* acc) {
  const __m512i low0 = _mm512_load_si512(EIGHTH_BYTES.low);
  const __m512i low1 = _mm512_load_si512(EIGHTH_BYTES.low + 64);
  const __m512i high0 = _mm512_load_si512(EIGHTH_BYTES.high);
  const __m512i high1 = _mm512_load_si512(EIGHTH_BYTES.high + 64);
  const __m512i sign = _mm512_set1_epi8((char)0x80), top = _mm512_set1_epi32((int)0xffff0000);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < count; k += BLOCK, tiles += E4M3_TILE, x += BLOCK) {
    UNROLL for (int i = 0; i < E4M3_TILE; i += 64)
        _mm_prefetch((const char*)tiles + PREFETCH + i, _MM_HINT_T0);
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    UNROLL for (int m = 0; m < BLOCK; m += 4) {
      const __m512i v = _mm512_loadu_si512(tiles + GROUP * (4 + m));
      const __m512i low = _mm512_permutex2var_epi8(low0, v, low1);
      const __m512i high = _mm512_ternarylogic_epi32(  // or its sign
          _mm512_permutex2var_epi8(high0, v, high1), v, sign, 0xf8);
      const __m512i first = _mm512_unpacklo_epi8(low, high), second = _mm512_unpackhi_epi8(low, high);
      even = _mm512_fmadd_ps(_mm512_set1_ps(x[m]), (__m512)_mm512_slli_epi32(first, 16), even);
      odd = _mm512_fmadd_ps(_mm512_set1_ps(x[m + 1]), (__m512)_mm512_and_si512(first, top), odd);
      even = _mm512_fmadd_ps(_mm512_set1_ps(x[m + 2]), (__m512)_mm512_slli_epi32(second, 16), even);
      odd = _mm512_fmadd_ps(_mm512_set1_ps(x[m + 3]), (__m512)_mm512_and_si512(second, top), odd);
    }
    sum = _mm512_fmadd_ps(_mm512_add_ps(even, odd), _mm512_loadu_ps(tiles), sum);
  }
  _mm512_storeu_ps(acc, sum);
}
#define BN_LOOKUP_ROW lookup_row
#endif

}  // namespace
}  // namespace banyan
