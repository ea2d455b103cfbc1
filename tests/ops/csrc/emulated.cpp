// The AVX-512 files of the linear family on a machine without AVX-512: SIMDe gives the vectors, plain
// loops the tile registers. Compile with -DKERNEL_FILE="\"linear_vnni.cpp\"" or linear_amx.cpp.
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <cstdint>
#include <cstring>
#include <simde/x86/avx512.h>
#include <immintrin.h>

// What SIMDe lacks, or would round in another way: in halves of eight.
#undef _mm512_cvtph_ps
inline simde__m512 emulated_cvtph(__m256i halves) {
  union {
    simde__m512 whole;
    __m256 part[2];
  } out;
  out.part[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  out.part[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  return out.whole;
}
#define _mm512_cvtph_ps(x) emulated_cvtph(x)
#undef _mm512_cvtps_ph
inline __m256i emulated_to_half(simde__m512 v) {
  union {
    simde__m512 whole;
    __m256 part[2];
  } in;
  in.whole = v;
  return _mm256_set_m128i(_mm256_cvtps_ph(in.part[1], 0), _mm256_cvtps_ph(in.part[0], 0));
}
#define _mm512_cvtps_ph(x, mode) emulated_to_half(x)

#undef _mm512_fmadd_ps
inline simde__m512 emulated_fma(simde__m512 a, simde__m512 b, simde__m512 c) {
  union U {
    simde__m512 whole;
    __m256 part[2];
  } x, y, z;
  x.whole = a;
  y.whole = b;
  z.whole = c;
  for (int i = 0; i < 2; i++) x.part[i] = _mm256_fmadd_ps(x.part[i], y.part[i], z.part[i]);
  return x.whole;
}
#define _mm512_fmadd_ps(a, b, c) emulated_fma(a, b, c)

inline simde__m512 emulated_to_float(simde__m512i v) {
  union {
    simde__m512i whole;
    __m256i part[2];
  } x;
  x.whole = v;
  union {
    simde__m512 whole;
    __m256 part[2];
  } y;
  for (int i = 0; i < 2; i++) y.part[i] = _mm256_cvtepi32_ps(x.part[i]);
  return y.whole;
}
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(v) emulated_to_float(v)
inline simde__m512i emulated_to_int(simde__m512 v) {
  union {
    simde__m512 whole;
    __m256 part[2];
  } x;
  x.whole = v;
  union {
    simde__m512i whole;
    __m256i part[2];
  } y;
  for (int i = 0; i < 2; i++) y.part[i] = _mm256_cvtps_epi32(x.part[i]);
  return y.whole;
}
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32(v) emulated_to_int(v)
inline simde__m512i emulated_madd(simde__m512i a, simde__m512i b) {
  union U {
    simde__m512i whole;
    __m256i part[2];
  } x, y;
  x.whole = a;
  y.whole = b;
  for (int i = 0; i < 2; i++) x.part[i] = _mm256_madd_epi16(x.part[i], y.part[i]);
  return x.whole;
}
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) emulated_madd(a, b)
inline simde__m512i emulated_widen(__m256i v) {
  union {
    simde__m512i whole;
    __m256i part[2];
  } y;
  y.part[0] = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(v));
  y.part[1] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1));
  return y.whole;
}
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(v) emulated_widen(v)

struct EmulatedTiles {
  uint16_t bytes[16];
  uint8_t rows[16];
  uint8_t data[8][16][64];
};
static EmulatedTiles tiles;
inline void emulated_config(const void* p) {
  std::memset(&tiles, 0, sizeof tiles);
  std::memcpy(tiles.bytes, (const char*)p + 16, 32);
  std::memcpy(tiles.rows, (const char*)p + 48, 16);
}
inline void emulated_dot(int c, int a, int b) {
  for (int m = 0; m < tiles.rows[a]; m++)
    for (int k = 0; k < tiles.bytes[a] / 4; k++)
      for (int n = 0; n < tiles.bytes[b] / 4; n++) {
        int32_t sum;
        std::memcpy(&sum, &tiles.data[c][m][4 * n], 4);
        for (int j = 0; j < 4; j++)
          sum += (int8_t)tiles.data[a][m][4 * k + j] * (int)tiles.data[b][k][4 * n + j];
        std::memcpy(&tiles.data[c][m][4 * n], &sum, 4);
      }
}
inline void emulated_load(int t, const void* p, int64_t stride) {
  for (int r = 0; r < tiles.rows[t]; r++)
    std::memcpy(tiles.data[t][r], (const char*)p + r * stride, tiles.bytes[t]);
}
inline void emulated_store(int t, void* p, int64_t stride) {
  for (int r = 0; r < tiles.rows[t]; r++)
    std::memcpy((char*)p + r * stride, tiles.data[t][r], tiles.bytes[t]);
}
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_loadconfig(p) emulated_config(p)
#define _tile_release() (void)0
#define _tile_zero(t) std::memset(tiles.data[t], 0, sizeof tiles.data[t])
#define _tile_loadd(t, p, stride) emulated_load(t, p, stride)
#define _tile_stored(t, p, stride) emulated_store(t, p, stride)
#define _tile_dpbsud(c, a, b) emulated_dot(c, a, b)
#define __AVX512F__ 1
#include KERNEL_FILE
