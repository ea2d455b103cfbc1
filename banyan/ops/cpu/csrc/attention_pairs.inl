// What every attention on rounded numbers shares: exponentials and values in bf16, two keys at a time.
// Included by attention_pairs_<set>.cpp.
#include "attention_spans.inl"

namespace banyan {
namespace {

#define BN_BF16 __attribute__((target("avx512bf16")))


constexpr int CHUNK = 2 * LANES;  // exponentials that are rounded at once
constexpr int SOFTENED = 4;       // queries whose exponentials are made at once

inline Range chunks_of(Range keys) { return {keys.lo / CHUNK, (keys.hi + CHUNK - 1) / CHUNK}; }

// --- softmax -------------------------------------------------------------------------------------

// 2^x, to 2^-13 of it: the rounding to bf16 that follows is 16 times as coarse.
inline vf two_to_the(vf x) {
  const vf r = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
  vf p = splat(7.802453711e-02f);
  p = fma(p, r, splat(2.260671992e-01f));
  p = fma(p, r, splat(6.958334891e-01f));
  p = fma(p, r, splat(9.999252276e-01f));
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
}

inline uint32_t lanes_below(int n) { return n <= 0 ? 0 : n >= LANES ? 0xffff : (1u << n) - 1; }

// Logits of a chunk; -infinity where its keys are not seen.
struct Chunk {
  vf even, odd;
  Chunk(const float* logits, int at, Range seen)
      : even(load(logits + at)), odd(load(logits + at + LANES)) {
    if (at >= seen.lo && at + CHUNK <= seen.hi) return;
    even = cut(even, at, seen);
    odd = cut(odd, at + LANES, seen);
  }

 private:
  static vf cut(vf logits, int at, Range seen) {
    uint32_t lanes = lanes_below(seen.hi - at) & ~lanes_below(seen.lo - at);
    return (vf)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), (__mmask16)lanes, (__m512)logits);
  }
};

// Logits of R queries, in units of `units`, become exponentials in bf16, in the first half of their
// memory: those of the keys seen, and zeros beside them in `chunks`.
template <int R>
BN_BF16 void soften(float* logits, const Range* seen, Range chunks, const float* units,
                    float soft_cap, Share* shares) {
  const int begin = chunks.lo * CHUNK, end = chunks.hi * CHUNK;
  float unit[R], top[R];
  UNROLL for (int r = 0; r < R; r++) {
    unit[r] = units[r];
    if (soft_cap == 0) continue;
    for (float* at = logits + r * SPAN + begin; at < logits + r * SPAN + end; at += LANES)
      store(at, splat(soft_cap) * tanh(load(at) * splat(unit[r]) / splat(soft_cap)));
    unit[r] = 1.0f;
  }
  __m512 most[R], most_of_odd[R], all[R];
  vf factor[R], from[R];
  UNROLL for (int r = 0; r < R; r++) most[r] = most_of_odd[r] = _mm512_set1_ps(-INFINITY);
  for (int i = begin; i < end; i += CHUNK)
    UNROLL for (int r = 0; r < R; r++) {
      const Chunk of(logits + r * SPAN, i, seen[r]);
      most[r] = _mm512_max_ps((__m512)of.even, most[r]);
      most_of_odd[r] = _mm512_max_ps((__m512)of.odd, most_of_odd[r]);
    }
  UNROLL for (int r = 0; r < R; r++) {
    top[r] = _mm512_reduce_max_ps(_mm512_max_ps(most_of_odd[r], most[r]));
    factor[r] = splat(unit[r] * 1.44269504088896341f);
    from[r] = splat(-top[r]) * factor[r];
    all[r] = _mm512_setzero_ps();
  }
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (int i = begin; i < end; i += CHUNK)
    UNROLL for (int r = 0; r < R; r++) {
      const Chunk of(logits + r * SPAN, i, seen[r]);
      __m512 even = (__m512)two_to_the(fma(of.even, factor[r], from[r]));
      __m512 odd = (__m512)two_to_the(fma(of.odd, factor[r], from[r]));
      __m512bh both = _mm512_cvtne2ps_pbh(odd, even);
      all[r] = _mm512_dpbf16_ps(all[r], both, ones);
      std::memcpy((uint16_t*)(logits + r * SPAN) + i, &both, sizeof both);
    }
  UNROLL for (int r = 0; r < R; r++)
    shares[r] = {top[r] * unit[r], _mm512_reduce_add_ps(all[r])};
}

// Up to SOFTENED queries. What is made of one that sees nothing is of no use.
inline void soften_some(float* logits, int count, const Range* seen, Range chunks,
                        const float* units, float soft_cap, Share* shares) {
  using Soften = void (*)(float*, const Range*, Range, const float*, float, Share*);
  constexpr Soften SOFTEN[] = {soften<1>, soften<2>, soften<3>, soften<4>};
  SOFTEN[count - 1](logits, seen, chunks, units, soft_cap, shares);
}

// --- values --------------------------------------------------------------------------------------

// Numbers of two keys beside each other, in bf16.
template <class C>
BN_BF16 inline vi make_value_pair(const uint16_t* row, int dim, __m512i order) {
  __m512bh both = _mm512_cvtne2ps_pbh((__m512)C::get(row + dim), (__m512)C::get(row));
  return (vi)_mm512_permutexvar_epi16(order, (__m512i)both);
}
inline __m512i order_of_pairs() {
  uint16_t order[2 * LANES];
  for (int i = 0; i < 2 * LANES; i++) order[i] = (uint16_t)(i / 2 + i % 2 * LANES);
  return _mm512_loadu_si512(order);
}

}  // namespace
}  // namespace banyan
