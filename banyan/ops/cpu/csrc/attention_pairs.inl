// What every attention on rounded numbers shares: integers of queries and keys and their products by
// vectors, exponentials and values in bf16, two keys at a time.
// Included by attention_pairs_<set>.cpp.
#include "attention_spans.inl"

namespace banyan {
namespace {

#define BN_BF16 __attribute__((target("avx512bf16")))

constexpr int CHUNK = 2 * LANES;  // exponentials that are rounded at once
constexpr int SOFTENED = 4;       // queries whose exponentials are made at once

inline Range chunks_of(Range keys) { return {keys.lo / CHUNK, (keys.hi + CHUNK - 1) / CHUNK}; }

constexpr int K_BITS = 12;    // of the magnitude of a key's integers
constexpr int K_MOST = 4094;  // what fp16 makes of them; bf16 makes less

template <class C>
struct Bits;  // of a 16-bit float
template <>
struct Bits<Float16> {
  static constexpr int MANTISSA = 10, BIAS = 15, ODD = 31, LEAST = 1;
};
template <>
struct Bits<Bfloat16> {
  static constexpr int MANTISSA = 7, BIAS = 127, ODD = 255, LEAST = 12;  // units stay normal
};

// --- logits --------------------------------------------------------------------------------------

// A query's numbers times `scale` as integers, and the unit of these. As many bits as no sum of
// products needs more than 31 for.
inline float round_query(const float* q, int dim, float scale, int16_t* to) {
  int limit = INT32_MAX / (K_MOST * dim);
  float largest_of_all = (float)(limit < INT16_MAX ? limit : INT16_MAX);
  vi magnitudes{};  // the order of magnitudes is that of their bits, with NaN the largest
  for (int d = 0; d < dim; d += LANES) {
    vi bits = (vi)(load(q + d) * splat(scale)) & splat_i(0x7fffffff);
    magnitudes = (vi)_mm512_max_epi32((__m512i)magnitudes, (__m512i)bits);
  }
  int32_t top = _mm512_reduce_max_epi32((__m512i)magnitudes);
  float most, factor = 0.0f, unit = 0.0f;
  std::memcpy(&most, &top, sizeof most);
  if (top >= 0x7f800000)
    unit = NAN;
  else if (top >= 27 << 23)  // below 2^-100 it counts as zero: the factor must stay finite
    unit = most / largest_of_all, factor = largest_of_all / most;
  for (int d = 0; d < dim; d += LANES) {
    vi rounded = round_to_int(load(q + d) * splat(scale) * splat(factor));
    _mm256_storeu_si256((__m256i*)(to + d), _mm512_cvtepi32_epi16((__m512i)rounded));
  }
  return unit;
}

// Per key of a group: by what its numbers become integers, and the unit of these. A key that is not
// finite gets a unit that is no number.
template <class C>
void find_units(const uint16_t* k, int64_t stride, int dim, float* factors, float* units) {
  __m256i largest;
  if (stride == GROUP) {  // the whole group lies together
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i most = _mm512_setzero_si512(), other = most;
    for (int i = 0; i < GROUP * dim; i += 4 * GROUP) {
      most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(k + i), magnitude));
      other = _mm512_max_epu16(
          other, _mm512_and_si512(_mm512_loadu_si512(k + i + 2 * GROUP), magnitude));
    }
    most = _mm512_max_epu16(most, other);
    largest = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
  } else {
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    __m256i most = _mm256_setzero_si256(), other = most;
    for (int d = 0; d < dim; d += 2, k += 2 * stride) {
      __m256i even = _mm256_loadu_si256((const __m256i*)k);
      __m256i odd = _mm256_loadu_si256((const __m256i*)(k + stride));
      most = _mm256_max_epu16(most, _mm256_and_si256(even, magnitude));
      other = _mm256_max_epu16(other, _mm256_and_si256(odd, magnitude));
    }
    largest = _mm256_max_epu16(most, other);
  }
  vi top = (vi)_mm512_cvtepu16_epi32(largest) >> Bits<C>::MANTISSA;
  vi exponent = (vi)_mm512_max_epi32((__m512i)top, _mm512_set1_epi32(Bits<C>::LEAST));
  constexpr int SHIFT = K_BITS - 1 + Bits<C>::BIAS;
  store(factors, (vf)((splat_i(127 + SHIFT) - exponent) << 23));
  vf unit = (vf)((exponent + splat_i(127 - SHIFT)) << 23);
  store(units, choose(top == splat_i(Bits<C>::ODD), splat(NAN), unit));
}

// The numbers 2·pair and 2·pair + 1 of 16 keys as integers beside each other.
template <class C>
inline vi make_pair(const uint16_t* k, int64_t stride, vf factor) {
  const vf magic = splat(12582912.0f);  // 1.5 · 2^23: adding it leaves the integer in the low bits
  vi low = (vi)fma(C::get(k), factor, magic), high = (vi)fma(C::get(k + stride), factor, magic);
  return (vi)_mm512_mask_blend_epi16(0xaaaaaaaau, (__m512i)low, (__m512i)(high << 16));
}

// N groups of keys of pages, by pairs of numbers.
template <class Cached, int N>
struct KeysAsTheyLie {
  const uint16_t *k[N], *then[N];  // then: what is read after each
  int64_t stride;
  vf factors[N];
  KeysAsTheyLie(const uint16_t* const* groups, int64_t apart, const float* of) : stride(apart) {
    for (int n = 0; n < N; n++)
      k[n] = groups[n], then[n] = groups[n + AHEAD], factors[n] = load(of + n * GROUP);
  }
  vi at(int pair, int n) const {
    fetch(then[n] + 2 * pair * stride);
    if (stride > 2 * GROUP) fetch(then[n] + (2 * pair + 1) * stride);
    return make_pair<Cached>(k[n] + 2 * pair * stride, stride, factors[n]);
  }
};

// logits[r][n·16 ...] = q[r] · k for R queries and N groups of keys, but for the queries' units.
template <int R, int N, class K>
inline void score(const K& keys, const int32_t* q, int pairs, const float* units, float* logits) {
  vi sums[R][N] = {};
  for (int d = 0; d < pairs; d++) {
    vi k[N];
    UNROLL for (int n = 0; n < N; n++) k[n] = keys.at(d, n);
    UNROLL for (int r = 0; r < R; r++) {
      vi x = splat_i(q[r * pairs + d]);
      UNROLL for (int n = 0; n < N; n++)
        sums[r][n] = (vi)_mm512_dpwssd_epi32((__m512i)sums[r][n], (__m512i)x, (__m512i)k[n]);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int n = 0; n < N; n++)
      store(logits + r * SPAN + n * GROUP, to_float(sums[r][n]) * load(units + n * GROUP));
}

// N groups of pages, and their units.
template <class C, int R, int N>
void score_pages(const int32_t* q, int pairs, const uint16_t* const* k, int64_t stride,
                 float* logits) {
  alignas(64) float factors[N * GROUP], units[N * GROUP];
  for (int n = 0; n < N; n++)
    find_units<C>(k[n], stride, 2 * pairs, factors + n * GROUP, units + n * GROUP);
  score<R, N>(KeysAsTheyLie<C, N>(k, stride, factors), q, pairs, units, logits);
}
template <class C, int R>
void score_lying(const int32_t* q, int pairs, const uint16_t* const* k, int64_t stride, int groups,
                 float* logits) {
  constexpr int N = R <= 3 ? 4 : 2;
  int n = 0;
  for (; n + N <= groups; n += N)
    score_pages<C, R, N>(q, pairs, k + n, stride, logits + n * GROUP);
  for (; n < groups; n++) score_pages<C, R, 1>(q, pairs, k + n, stride, logits + n * GROUP);
}
// Up to TOGETHER queries.
template <class C>
void score_few(int count, const int16_t* q, int pairs, const uint16_t* const* k, int64_t stride,
               int groups, float* logits) {
  using Score = void (*)(const int32_t*, int, const uint16_t* const*, int64_t, int, float*);
  constexpr Score SCORE[] = {score_lying<C, 1>, score_lying<C, 2>, score_lying<C, 3>,
                             score_lying<C, 4>, score_lying<C, 5>, score_lying<C, 6>};
  SCORE[count - 1]((const int32_t*)q, pairs, k, stride, groups, logits);
}

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

// Numbers of a chunk of logits.
struct Chunk {
  vf even, odd;
  explicit Chunk(const float* logits) : even(load(logits)), odd(load(logits + LANES)) {}

  // -infinity where the keys from `at` on are not seen, whatever lies there.
  void cut(int at, Range seen) {
    if (at >= seen.lo && at + CHUNK <= seen.hi) return;
    even = cut_vector(even, at, seen);
    odd = cut_vector(odd, at + LANES, seen);
  }

 private:
  static vf cut_vector(vf x, int at, Range seen) {
    uint32_t lanes = lanes_below(seen.hi - at) & ~lanes_below(seen.lo - at);
    return (vf)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), (__mmask16)lanes, (__m512)x);
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
      Chunk of(logits + r * SPAN + i);
      of.cut(i, seen[r]);
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
      Chunk of(logits + r * SPAN + i);
      of.even = fma(of.even, factor[r], from[r]);
      of.odd = fma(of.odd, factor[r], from[r]);
      of.cut(i, seen[r]);  // behind the factor, which is 0 for a query of zeros
      __m512bh both =
          _mm512_cvtne2ps_pbh((__m512)two_to_the(of.odd), (__m512)two_to_the(of.even));
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
