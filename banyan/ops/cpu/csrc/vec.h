// Vectors of floats in the width of one instruction set: the same source, compiled once per set.
//
// Include it in a file that is compiled for one set (its name ends in _base, _avx2 or _avx512) and
// keep everything that uses it in an anonymous namespace: an inline function shared between such
// files could be linked in its wide form into the narrow path.
// Every function works lane by lane in a fixed order of operations, and products and sums are only
// fused where `fma` says so (the build switches contraction off), so a value depends on its inputs
// and the instruction set alone.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace banyan {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));

inline vf splat(float x) { return x - vf{}; }
inline vi splat_i(int32_t x) { return x - vi{}; }
inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline vf choose(vi mask, vf yes, vf no) {  // lanes of mask are 0 or -1
  return (vf)(((vi)yes & mask) | ((vi)no & ~mask));
}
// The bytes of a table of 16 at places 0 ... 15; it begins at a multiple of 16.
inline vi look_up(const uint8_t* table, vi place) {
#if defined(__AVX512F__)
  const __m512i all = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table));
  return (vi)_mm512_and_si512(_mm512_shuffle_epi8(all, (__m512i)place), _mm512_set1_epi32(255));
#elif defined(__AVX2__)
  const __m256i all = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
  return (vi)_mm256_and_si256(_mm256_shuffle_epi8(all, (__m256i)place), _mm256_set1_epi32(255));
#else
  for (int i = 0; i < LANES; i++) place[i] = table[place[i]];
  return place;
#endif
}
// The second where one is not a number.
inline vf max(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return choose(a > b, a, b);
#endif
}
inline vf min(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return choose(a < b, a, b);
#endif
}

// The first `n` lanes from memory, the others 0; and back.
inline vf load_some(const float* p, int n) {
  vf v{};
  std::memcpy(&v, p, sizeof(float) * n);
  return v;
}
inline void store_some(float* p, vf v, int n) { std::memcpy(p, &v, sizeof(float) * n); }

// Sum and maximum over the lanes, halves first: one order for every caller.
inline float sum(vf v) {
  float lanes[LANES];
  store(lanes, v);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}
inline float largest(vf v) {
  float lanes[LANES];
  store(lanes, v);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

inline float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t to_bf16(float f) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_fp16(uint16_t x) {
#if defined(__AVX2__) || defined(__AVX512F__)
  return _cvtsh_ss(x);
#else
  uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff, bits;
  float f;
  if (rest >= 0x7c00) {
    bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
  } else if (rest >= 0x400) {
    bits = sign | (rest + ((127 - 15) << 10)) << 13;
  } else {  // subnormal: rest · 2^-24
    f = (float)rest * 5.9604644775390625e-8f;
    std::memcpy(&bits, &f, 4);
    bits |= sign;
  }
  std::memcpy(&f, &bits, 4);
  return f;
#endif
}
inline uint16_t to_fp16(float f) {  // round to nearest even, overflow to infinity
#if defined(__AVX2__) || defined(__AVX512F__)
  return (uint16_t)_cvtss_sh(f, 0);
#else
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
  if (rest >= 0x47800000) return (uint16_t)(sign | 0x7c00);
  if (rest < 0x38800000) {  // below 2^-14: the sum with 0.5 rounds at 2^-24
    float abs, magic = 0.5f;
    std::memcpy(&abs, &rest, 4);
    abs += magic;
    std::memcpy(&rest, &abs, 4);
    return (uint16_t)(sign | (rest - 0x3f000000));
  }
  rest += 0xfff + (rest >> 13 & 1);
  return (uint16_t)(sign | ((rest >> 13) - ((127 - 15) << 10)));
#endif
}

inline vf load_fp16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = from_fp16(p[i]);
  return v;
#endif
}
// 2^-8 times floats of 8 bits (e4m3), none of which is a NaN: their bits are those of fp16 but for the
// bias of the exponent.
inline float from_e4m3(uint8_t x) { return from_fp16((uint16_t)((x & 0x80) << 8 | (x & 0x7f) << 7)); }
// Of LANES outputs, four to 16 bytes, the same four inputs: bytes are [two inputs][output][input].
inline void load_e4m3(const uint8_t* p, vf v[4]) {
#if defined(__AVX512F__)
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const __m512i bits = _mm512_set1_epi16((short)0xbf80);
  __m512i both = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(p));
  __m512i odd = _mm512_and_si512(_mm512_srai_epi16(both, 1), bits);
  __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(both, 8), 1), bits);
  v[0] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(even));
  v[1] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(odd));
  v[2] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
  v[3] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
#elif defined(__AVX2__)
  const __m256i bits = _mm256_set1_epi16((short)0xbf80);
  __m256i both = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i*)p), 0xd8);
  __m256i odd = _mm256_and_si256(_mm256_srai_epi16(both, 1), bits);
  __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(both, 8), 1), bits);
  v[0] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(even));
  v[1] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(odd));
  v[2] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(even, 1));
  v[3] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1));
#else
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < LANES; i++) v[j][i] = from_e4m3(p[i / 4 * 16 + j / 2 * 8 + i % 4 * 2 + j % 2]);
#endif
}
inline void store_fp16(uint16_t* p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0));
#elif defined(__AVX2__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0));
#else
  for (int i = 0; i < LANES; i++) p[i] = to_fp16(v[i]);
#endif
}
inline vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = from_bf16(p[i]);
  return v;
#endif
}
inline void store_bf16(uint16_t* p, vf v) {
  for (int i = 0; i < LANES; i++) p[i] = to_bf16(v[i]);
}

inline vf load_int8(const int8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vf v;
  for (int i = 0; i < LANES; i++) v[i] = (float)p[i];
  return v;
#endif
}

inline vi load_bytes_wide(const uint8_t* p) {  // with the sign of bit 7
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  vi v;
  for (int i = 0; i < LANES; i++) v[i] = (int8_t)p[i];
  return v;
#endif
}

inline vi round_to_int(vf x) {  // to nearest even
#if defined(__AVX512F__)
  return (vi)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtps_epi32((__m256)x);
#else
  vf magic = splat(12582912.0f);  // 1.5 · 2^23: adding it leaves the integer in the low bits
  return (vi)(x + magic) - (vi)magic;
#endif
}
inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }

// e^x to about 2 units in the last place: x = n·ln2 + r, a polynomial of degree 6 on |r| <= ln2/2,
// and 2^n put into the exponent. Below -87 the result is 0, above 88 it is infinity; NaN stays.
inline vf exp(vf x) {
  vi low = x < splat(-87.0f), high = x > splat(88.0f);
  vf clamped = min(max(x, splat(-87.0f)), splat(88.0f));
  vi n = round_to_int(clamped * splat(1.44269504088896341f));
  vf nf = to_float(n);
  vf r = fma(nf, splat(-0.693359375f), clamped);
  r = fma(nf, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  vf result = p * (vf)((n + 127) << 23);
  result = choose(low, vf{}, result);
  result = choose(high, splat(INFINITY), result);
  return choose(x != x, x, result);
}

}  // namespace
}  // namespace banyan
