// What the arithmetic units and the memory of one thread give at most, in one instruction set.
#include "probe.h"
#include "vec.h"

namespace banyan {
namespace {

constexpr int CHAINS = 12;  // independent sums: as many as cover the latency of a fused product

inline void stay(vf& v) {
#if defined(__x86_64__)
  asm volatile("" : "+x"(v));
#else
  asm volatile("" : "+w"(v));
#endif
}

double products(int64_t rounds) {
  vf sums[CHAINS], x = splat(1.0f), y = splat(1e-9f);
  for (vf& s : sums) s = splat(0.5f);
  for (int64_t i = 0; i < rounds; i++)
    for (vf& s : sums) {
      s = fma(x, y, s);
      stay(s);
    }
  return 2.0 * LANES * CHAINS * (double)rounds;
}

[[maybe_unused]] double small_products(int64_t rounds) {
#if defined(__AVX512VNNI__)
  __m512i sums[CHAINS] = {}, w = _mm512_set1_epi8(3), x = _mm512_set1_epi8(1);
  for (int64_t i = 0; i < rounds; i++)
    for (__m512i& s : sums) {
      s = _mm512_dpbusd_epi32(s, w, x);
      asm volatile("" : "+v"(s));
    }
  return 2.0 * 64 * CHAINS * (double)rounds;
#elif defined(__AVX2__)
  __m256i sums[CHAINS] = {}, w = _mm256_set1_epi8(1), x = _mm256_set1_epi8(1);
  asm volatile("" : "+x"(w), "+x"(x));
  for (int64_t i = 0; i < rounds; i++)
    for (__m256i& s : sums) {
      __m256i pairs = _mm256_maddubs_epi16(w, x);
      asm volatile("" : "+x"(pairs));
      s = _mm256_add_epi16(s, pairs);
      asm volatile("" : "+x"(s));
    }
  return 2.0 * 32 * CHAINS * (double)rounds;
#else
  (void)rounds;
  return 0;
#endif
}

#if defined(__AVX512VNNI__)
[[maybe_unused]] __attribute__((target("avx512bf16"))) double pair_products(int64_t rounds) {
  if (!has_bf16_products()) return 0;
  __m512 sums[CHAINS] = {};
  const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (int64_t i = 0; i < rounds; i++)
    for (__m512& s : sums) {
      s = _mm512_dpbf16_ps(s, x, x);
      asm volatile("" : "+v"(s));
    }
  return 2.0 * 32 * CHAINS * (double)rounds;
}
#else
[[maybe_unused]] double pair_products(int64_t) { return 0; }
#endif

float read_all(const float* data, int64_t count) {
  constexpr int AT_ONCE = 8;
  vf sums[AT_ONCE] = {};
  int64_t step = AT_ONCE * LANES;
  for (int64_t i = 0; i + step <= count; i += step)
    for (int j = 0; j < AT_ONCE; j++) {
      __builtin_prefetch(data + i + j * LANES + 1024);
      sums[j] += load(data + i + j * LANES);
    }
  for (int j = 1; j < AT_ONCE; j++) sums[0] += sums[j];
  return sum(sums[0]);
}

}  // namespace

#ifdef BN_TABLE  // not where probe_amx.cpp includes this file
const ProbeKernels BN_TABLE = {products, small_products, pair_products, read_all};
#endif
}  // namespace banyan
