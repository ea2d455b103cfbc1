// Values weighed for few queries by vectors, to the last bit as tile registers have it: what memory
// holds up needs no registers. Included by attention_pairs_tiles.inl.
//
// tdpbf16ps adds the products of even keys and those of odd ones, fused and ascending, then both sums,
// then those to what was there; tiny numbers are zero. So does this.
#include "attention_pairs.inl"

namespace banyan {
namespace {

// Which bits of a pair of keys are kept: those of keys that are seen by a query.
inline uint32_t mask_of_pair(int key, Range seen) {
  return (key >= seen.lo && key < seen.hi ? 0xffff : 0) |
         (key + 1 >= seen.lo && key + 1 < seen.hi ? 0xffff0000 : 0);
}
// Values of two keys beside each other; zeros for those that are not kept and, where it is so
// wished, for those that are not finite.
template <class C>
BN_BF16 inline __m512i value_pair(const uint16_t* row, int dim, __m512i order, __m512i kept,
                                  bool finite_only) {
  __m512i pair = _mm512_and_si512((__m512i)make_value_pair<C>(row, dim, order), kept);
  if (!finite_only) return pair;
  const __m512i magnitude = _mm512_and_si512(pair, _mm512_set1_epi16(0x7fff));
  return _mm512_maskz_mov_epi16(_mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(0x7f80)),
                                pair);
}

// Tiny numbers are zero, before and after an operation. What is computed meanwhile is in functions of
// its own: a compiler does not see that it depends on this.
class TinyAsZero {
 public:
  TinyAsZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~TinyAsZero() { _mm_setcsr(before_); }

 private:
  uint32_t before_;
};

// values[r] += p[r] · v for the keys of a chunk and W vectors of the head. p: [R][SPAN] fp32.
template <class C, int R, int W>
BN_BF16 inline void weigh_vectors(const float* p, const Groups<C>& of, Range pairs, Range seen,
                                  int d, int dim, bool finite_only, float* values) {
  const __m512i order = order_of_pairs(), upper = _mm512_set1_epi32((int32_t)0xffff0000);
  vf even[R][W] = {}, odd[R][W] = {};
  for (int key = pairs.lo; key < pairs.hi; key += 2) {
    const uint16_t* row = of.v[key / GROUP] + key % GROUP * dim + d;
    const uint16_t* then = row + (of.v[key / GROUP + AHEAD] - of.v[key / GROUP]);
    fetch(then);
    fetch(then + dim);
    const __m512i kept = _mm512_set1_epi32((int32_t)mask_of_pair(key, seen));
    UNROLL for (int w = 0; w < W; w++) {
      __m512i pair = value_pair<C>(row + w * LANES, dim, order, kept, finite_only);
      vf x = (vf)_mm512_slli_epi32(pair, 16), y = (vf)_mm512_and_si512(pair, upper);
      UNROLL for (int r = 0; r < R; r++) {
        even[r][w] = fma(splat(p[r * SPAN + key]), x, even[r][w]);
        odd[r][w] = fma(splat(p[r * SPAN + key + 1]), y, odd[r][w]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int w = 0; w < W; w++) {
      float* to = values + r * dim + d + w * LANES;
      store(to, load(to) + (even[r][w] + odd[r][w]));
    }
}
template <class C, int R>
BN_BF16 __attribute__((noinline)) void weigh_chunk(const float* p, const Groups<C>& of, int chunk,
                                                   Range seen, int dim, bool finite_only,
                                                   float* values) {
  const Range pairs = meet({chunk * CHUNK, (chunk + 1) * CHUNK}, {seen.lo / 2 * 2, seen.hi});
  int d = 0;
  for (; d + 2 * LANES <= dim; d += 2 * LANES)
    weigh_vectors<C, R, 2>(p, of, pairs, seen, d, dim, finite_only, values);
  if (d < dim) weigh_vectors<C, R, 1>(p, of, pairs, seen, d, dim, finite_only, values);
}

// Up to TOGETHER queries over the keys of a span: from nothing.
template <class C>
void weigh_few(int count, const float* p, const Groups<C>& of, Range seen, int dim,
               bool finite_only, float* values) {
  using Weigh = void (*)(const float*, const Groups<C>&, int, Range, int, bool, float*);
  constexpr Weigh WEIGH[] = {weigh_chunk<C, 1>, weigh_chunk<C, 2>, weigh_chunk<C, 3>,
                             weigh_chunk<C, 4>, weigh_chunk<C, 5>, weigh_chunk<C, 6>};
  std::memset(values, 0, sizeof(float) * count * dim);
  const Range chunks = chunks_of(seen);
  const TinyAsZero meanwhile;
  for (int c = chunks.lo; c < chunks.hi; c++)
    WEIGH[count - 1](p, of, c, seen, dim, finite_only, values);
}

}  // namespace
}  // namespace banyan
