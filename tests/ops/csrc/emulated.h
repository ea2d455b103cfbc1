// AVX-512, VNNI and AMX in halves of AVX2, for machines without them: what the files of the CPU
// library use, with the results that the manual gives. Put it before such a file with -include.
//
// Loads and stores of whole vectors by names that ask for alignment stop the program without it, as
// the machine would.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#define __AVX512VNNI__ 1
#define BN_LOOKUP_TARGET  // what follows is for AVX2
#define BN_BF16_TARGET

namespace emulated {
namespace {

template <class To, class From>
inline To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// A vector of 512 bits as two of 256.
template <class Half>
struct Halves {
  Half low, high;
};
typedef Halves<__m256> F;
typedef Halves<__m256d> D;
typedef Halves<__m256i> I;

#define EMULATE_ONE(name, Out, In, T, half)                              \
  inline Out name(T x) {                                                 \
    In h = as<In>(x);                                                    \
    return as<Out>(Halves<decltype(half(h.low))>{half(h.low), half(h.high)}); \
  }
#define EMULATE_TWO(name, V, T, half)                                 \
  inline T name(T x, T y) {                                           \
    V a = as<V>(x), b = as<V>(y);                                     \
    return as<T>(V{half(a.low, b.low), half(a.high, b.high)});        \
  }
#define EMULATE_SPLAT(name, V, T, S, half) \
  inline T name(S x) { return as<T>(V{half(x), half(x)}); }
#define EMULATE_SHIFT(name, half)                           \
  inline __m512i name(__m512i x, int by) {                  \
    I a = as<I>(x);                                         \
    return as<__m512i>(I{half(a.low, by), half(a.high, by)}); \
  }

EMULATE_SPLAT(set1_ps, F, __m512, float, _mm256_set1_ps)
EMULATE_SPLAT(set1_pd, D, __m512d, double, _mm256_set1_pd)
EMULATE_SPLAT(set1_epi8, I, __m512i, char, _mm256_set1_epi8)
EMULATE_SPLAT(set1_epi16, I, __m512i, short, _mm256_set1_epi16)
EMULATE_SPLAT(set1_epi32, I, __m512i, int, _mm256_set1_epi32)
EMULATE_SPLAT(set1_epi64, I, __m512i, long long, _mm256_set1_epi64x)
inline __m512i setzero_si512() { return set1_epi32(0); }
inline __m512 setzero_ps() { return set1_ps(0); }
inline __m512i setr_epi64(long long a, long long b, long long c, long long d, long long e,
                          long long f, long long g, long long h) {
  return as<__m512i>(I{_mm256_setr_epi64x(a, b, c, d), _mm256_setr_epi64x(e, f, g, h)});
}

EMULATE_TWO(max_ps, F, __m512, _mm256_max_ps)
EMULATE_TWO(min_ps, F, __m512, _mm256_min_ps)
EMULATE_TWO(mul_ps, F, __m512, _mm256_mul_ps)
EMULATE_TWO(add_ps, F, __m512, _mm256_add_ps)
EMULATE_TWO(add_pd, D, __m512d, _mm256_add_pd)
EMULATE_TWO(add_epi32, I, __m512i, _mm256_add_epi32)
EMULATE_TWO(add_epi64, I, __m512i, _mm256_add_epi64)
EMULATE_TWO(sub_epi64, I, __m512i, _mm256_sub_epi64)
EMULATE_TWO(and_si512, I, __m512i, _mm256_and_si256)
EMULATE_TWO(or_si512, I, __m512i, _mm256_or_si256)
EMULATE_TWO(madd_epi16, I, __m512i, _mm256_madd_epi16)
EMULATE_TWO(unpacklo_epi8, I, __m512i, _mm256_unpacklo_epi8)
EMULATE_TWO(unpackhi_epi8, I, __m512i, _mm256_unpackhi_epi8)
EMULATE_TWO(shuffle_epi8, I, __m512i, _mm256_shuffle_epi8)
EMULATE_SPLAT(broadcast_i32x4, I, __m512i, __m128i, _mm256_broadcastsi128_si256)
EMULATE_SHIFT(slli_epi16, _mm256_slli_epi16)
EMULATE_SHIFT(srai_epi16, _mm256_srai_epi16)
EMULATE_SHIFT(srli_epi16, _mm256_srli_epi16)
EMULATE_SHIFT(slli_epi32, _mm256_slli_epi32)
EMULATE_ONE(cvtps_epi32, __m512i, F, __m512, _mm256_cvtps_epi32)
EMULATE_ONE(cvtepi32_ps, __m512, I, __m512i, _mm256_cvtepi32_ps)

inline __m512 fmadd_ps(__m512 x, __m512 y, __m512 z) {
  F a = as<F>(x), b = as<F>(y), c = as<F>(z);
  return as<__m512>(
      F{_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)});
}

struct Octets {
  uint8_t at[64];
};
struct Longs {
  int64_t at[8];
};
inline __m512i permutex2var_epi8(__m512i x, __m512i places, __m512i y) {
  Octets a = as<Octets>(x), b = as<Octets>(y), p = as<Octets>(places), found;
  for (int i = 0; i < 64; i++) found.at[i] = (p.at[i] & 64 ? b : a).at[p.at[i] & 63];
  return as<__m512i>(found);
}
inline __m512i permutexvar_epi64(__m512i places, __m512i x) {
  Longs a = as<Longs>(x), p = as<Longs>(places), found;
  for (int i = 0; i < 8; i++) found.at[i] = a.at[p.at[i] & 7];
  return as<__m512i>(found);
}
inline __m512i ternarylogic_epi32(__m512i x, __m512i y, __m512i z, int what) {
  if (what != 0xf8) std::abort();  // the one that is used
  return or_si512(x, and_si512(y, z));
}

// Between widths.
inline __m256i castsi512_si256(__m512i x) { return as<I>(x).low; }
inline __m256i extracti64x4_epi64(__m512i x, int part) { return part ? as<I>(x).high : as<I>(x).low; }
inline __m256 castps512_ps256(__m512 x) { return as<F>(x).low; }
inline __m256 extractf32x8_ps(__m512 x, int part) { return part ? as<F>(x).high : as<F>(x).low; }
inline __m512 castsi512_ps(__m512i x) { return as<__m512>(x); }
inline __m512i castpd_si512(__m512d x) { return as<__m512i>(x); }
inline __m512d cvtps_pd(__m256 x) {
  return as<__m512d>(
      D{_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))});
}
inline __m512 cvtph_ps(__m256i x) {
  return as<__m512>(F{_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
                      _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))});
}
inline __m256i cvtps_ph(__m512 x, int) {
  F a = as<F>(x);
  return _mm256_set_m128i(_mm256_cvtps_ph(a.high, 0), _mm256_cvtps_ph(a.low, 0));
}
inline __m512i cvtepu16_epi32(__m256i x) {
  return as<__m512i>(I{_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
                       _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))});
}
inline __m512i cvtepi8_epi32(__m128i x) {
  return as<__m512i>(I{_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))});
}

// Memory.
template <class T>
inline T loadu(const void* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class T>
inline T load(const void* p) {
  if ((uintptr_t)p % 64) std::abort();
  return loadu<T>(p);
}
template <class T>
inline void storeu(void* p, T x) {
  std::memcpy(p, &x, sizeof x);
}
template <class T>
inline void store(void* p, T x) {
  if ((uintptr_t)p % 64) std::abort();
  storeu(p, x);
}

// Lane by lane.
struct Lanes {
  int32_t lane[16];
};
inline __m512i setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j,
                          int k, int l, int m, int n, int o, int p) {
  return as<__m512i>(Lanes{{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p}});
}
inline uint16_t movepi32_mask(__m512i x) {
  Lanes a = as<Lanes>(x);
  uint16_t mask = 0;
  for (int i = 0; i < 16; i++) mask |= (uint16_t)((uint32_t)a.lane[i] >> 31 << i);
  return mask;
}
template <class T>
inline T compress(uint16_t mask, T x) {
  Lanes from = as<Lanes>(x), to{};
  for (int i = 0, n = 0; i < 16; i++)
    if (mask >> i & 1) to.lane[n++] = from.lane[i];
  return as<T>(to);
}
// Unsigned times signed bytes, four products to a sum: no step of it saturates.
inline __m512i dpbusd_epi32(__m512i sum, __m512i x, __m512i y) {
  Lanes s = as<Lanes>(sum);
  uint8_t a[64];
  int8_t b[64];
  std::memcpy(a, &x, 64);
  std::memcpy(b, &y, 64);
  for (int i = 0; i < 64; i++) s.lane[i / 4] += a[i] * b[i];
  return as<__m512i>(s);
}

inline __m512i dpwssd_epi32(__m512i sum, __m512i x, __m512i y) {
  return add_epi32(sum, madd_epi16(x, y));
}

// Pairs of bf16: each lane's later product first, both fused, nothing between normal numbers and zero.
inline uint16_t rounded_bf16(float x) {
  uint32_t bits = as<uint32_t>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  if (!(bits & 0x7f800000)) return (uint16_t)(bits >> 16 & 0x8000);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline __m256i cvtneps_pbh(__m512 x) {
  struct { float lane[16]; } from = as<decltype(from)>(x);
  struct { uint16_t lane[16]; } to;
  for (int i = 0; i < 16; i++) to.lane[i] = rounded_bf16(from.lane[i]);
  return as<__m256i>(to);
}
template <class V>
inline __m512 dpbf16_ps(__m512 sum, V x, V y) {
  struct { float lane[16]; } s = as<decltype(s)>(sum);
  struct { uint16_t lane[32]; } a = as<decltype(a)>(x), b = as<decltype(b)>(y);
  auto wide = [](uint16_t v) { return as<float>((uint32_t)(v & 0x7f80 ? v : v & 0x8000) << 16); };
  for (int i = 0; i < 32; i++) {
    const int at = i ^ 1;
    s.lane[i / 2] = __builtin_fmaf(wide(a.lane[at]), wide(b.lane[at]), s.lane[i / 2]);
  }
  return as<__m512>(s);
}

// Tile registers; a shape that the machine refuses stops the program.
struct Tiles {
  uint16_t bytes[8];
  uint8_t rows[8], data[8][16][64];
};
thread_local Tiles tiles;

inline void tile_loadconfig(const void* p) {
  uint8_t palette, rows[16];
  uint16_t bytes[16];
  std::memcpy(&palette, p, 1);
  std::memcpy(bytes, (const char*)p + 16, sizeof bytes);
  std::memcpy(rows, (const char*)p + 48, sizeof rows);
  std::memset(&tiles, 0, sizeof tiles);
  if (palette != 1) std::abort();
  for (int t = 0; t < 16; t++) {
    if (t >= 8 ? rows[t] || bytes[t] : rows[t] > 16 || bytes[t] > 64 || !rows[t] != !bytes[t])
      std::abort();
    if (t < 8) tiles.rows[t] = rows[t], tiles.bytes[t] = bytes[t];
  }
}
inline void tile_release() { std::memset(&tiles, 0, sizeof tiles); }
inline void tile_zero(int t) {
  if (!tiles.rows[t]) std::abort();
  std::memset(tiles.data[t], 0, sizeof tiles.data[t]);
}
inline void tile_loadd(int t, const void* p, int64_t stride) {
  tile_zero(t);
  for (int r = 0; r < tiles.rows[t]; r++)
    std::memcpy(tiles.data[t][r], (const char*)p + r * stride, tiles.bytes[t]);
}
inline void tile_stored(int t, void* p, int64_t stride) {
  if (!tiles.rows[t]) std::abort();
  for (int r = 0; r < tiles.rows[t]; r++)
    std::memcpy((char*)p + r * stride, tiles.data[t][r], tiles.bytes[t]);
}
// bf16: even products in one sum from zero, odd ones in another, each fused; what is below the smallest
// normal number is zero, read or made.
inline float flushed(float x) {
  return as<uint32_t>(x) & 0x7f800000 ? x : as<float>(as<uint32_t>(x) & 0x80000000);
}
inline void tile_dpbf16ps(int c, int a, int b) {
  if (tiles.rows[c] != tiles.rows[a] || tiles.bytes[c] != tiles.bytes[b] ||
      tiles.bytes[a] != 4 * tiles.rows[b])
    std::abort();
  auto wide = [](const uint8_t* at) { return flushed(as<float>((uint32_t)loadu<uint16_t>(at) << 16)); };
  for (int m = 0; m < tiles.rows[a]; m++)
    for (int n = 0; n < tiles.bytes[b] / 4; n++) {
      float sums[2] = {};
      for (int i = 0; i < 2 * tiles.rows[b]; i++) {
        float& sum = sums[i % 2];
        sum = flushed(__builtin_fmaf(wide(&tiles.data[a][m][2 * i]),
                                     wide(&tiles.data[b][i / 2][4 * n + 2 * (i % 2)]), sum));
      }
      uint8_t* to = &tiles.data[c][m][4 * n];
      storeu(to, flushed(flushed(loadu<float>(to)) + flushed(sums[0] + sums[1])));
    }
}

}  // namespace
}  // namespace emulated

// Some of these names are macros of the compiler's header.
#undef _mm512_slli_epi16
#undef _mm512_srai_epi16
#undef _mm512_srli_epi16
#undef _mm512_ternarylogic_epi32
#undef _mm512_extracti64x4_epi64
#undef _mm512_slli_epi32
#undef _mm512_extractf32x8_ps
#undef _mm512_cvtps_ph
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps

#define _mm512_set1_ps emulated::set1_ps
#define _mm512_set1_epi16 emulated::set1_epi16
#define _mm512_setr_epi64 emulated::setr_epi64
#define _mm512_setzero_ps emulated::setzero_ps
#define _mm512_add_ps emulated::add_ps
#define _mm512_unpacklo_epi8 emulated::unpacklo_epi8
#define _mm512_unpackhi_epi8 emulated::unpackhi_epi8
#define _mm512_srai_epi16 emulated::srai_epi16
#define _mm512_permutex2var_epi8 emulated::permutex2var_epi8
#define _mm512_permutexvar_epi64 emulated::permutexvar_epi64
#define _mm512_ternarylogic_epi32 emulated::ternarylogic_epi32
#define _mm512_castsi512_si256 emulated::castsi512_si256
#define _mm512_extracti64x4_epi64 emulated::extracti64x4_epi64
#define _mm512_set1_pd emulated::set1_pd
#define _mm512_set1_epi8 emulated::set1_epi8
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_epi64 emulated::set1_epi64
#define _mm512_setr_epi32 emulated::setr_epi32
#define _mm512_setzero_si512 emulated::setzero_si512
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_mul_ps emulated::mul_ps
#define _mm512_add_pd emulated::add_pd
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_add_epi64 emulated::add_epi64
#define _mm512_sub_epi64 emulated::sub_epi64
#define _mm512_and_si512 emulated::and_si512
#define _mm512_or_si512 emulated::or_si512
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#define _mm512_broadcast_i32x4 emulated::broadcast_i32x4
#define _mm512_slli_epi16 emulated::slli_epi16
#define _mm512_srli_epi16 emulated::srli_epi16
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtps_pd emulated::cvtps_pd
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_ph emulated::cvtps_ph
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_castps512_ps256 emulated::castps512_ps256
#define _mm512_castsi512_ps emulated::castsi512_ps
#define _mm512_castpd_si512 emulated::castpd_si512
#define _mm512_extractf32x8_ps emulated::extractf32x8_ps
#define _mm512_loadu_ps emulated::loadu<__m512>
#define _mm512_load_ps emulated::load<__m512>
#define _mm512_storeu_ps emulated::storeu<__m512>
#define _mm512_store_ps emulated::store<__m512>
#define _mm512_loadu_si512 emulated::loadu<__m512i>
#define _mm512_load_si512 emulated::load<__m512i>
#define _mm512_storeu_si512 emulated::storeu<__m512i>
#define _mm512_store_si512 emulated::store<__m512i>
#define _mm512_movepi32_mask emulated::movepi32_mask
#define _mm512_maskz_compress_ps emulated::compress<__m512>
#define _mm512_maskz_compress_epi32 emulated::compress<__m512i>
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_dpwssd_epi32 emulated::dpwssd_epi32
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _tile_loadconfig emulated::tile_loadconfig
#define _tile_release emulated::tile_release
#define _tile_zero emulated::tile_zero
#define _tile_loadd emulated::tile_loadd
#define _tile_stored emulated::tile_stored
#define _tile_dpbf16ps emulated::tile_dpbf16ps
