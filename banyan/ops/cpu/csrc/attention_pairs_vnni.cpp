// Attention on rounded numbers, two at a time, for pages of 16-bit floats.
//
// q·k: every query becomes integers below 2^15 and every key integers below 2^12, in units of its
// own; their sums are exact. A key's unit is a power of two, so what is at least half of its largest
// number stays as it is in fp16. p·v: exponentials and values are rounded to bf16 and added in fp32,
// two keys at a time and keys ascending; the sum that divides them is that of the rounded
// exponentials. A key that has no partner in a query's range goes with a zero in place of it: what
// lies there may be anything.
//
// Up to TOGETHER queries, which memory holds up, read pages and round as they go; more of them share
// blocks that are rounded once. Both see the same numbers in the same order.
#include <type_traits>

#include "attention_pairs.inl"

namespace banyan {
namespace {

constexpr int BLOCK_BYTES = 16384;  // of pairs that stay in the L1 cache while queries meet them

inline int groups_of_block(int dim) {
  int groups = BLOCK_BYTES / (GROUP * dim * (int)sizeof(uint16_t));
  return groups ? groups : 1;
}

// --- logits --------------------------------------------------------------------------------------

// N groups of keys of a block [group][dim / 2][GROUP].
struct KeysInPairs {
  const int32_t* block;
  int pairs;
  vi at(int pair, int n) const {
    return (vi)_mm512_load_si512(block + ((size_t)n * pairs + pair) * GROUP);
  }
};

template <int R>
void score_block(const int32_t* q, int pairs, const int32_t* block, int groups, const float* units,
                 float* logits) {
  auto some = [&](auto n_of, int n) {
    score<R, n_of.value>(KeysInPairs{block + (size_t)n * pairs * GROUP, pairs}, q, pairs,
                         units + n * GROUP, logits + n * GROUP);
  };
  int n = 0;
  for (; n + 4 <= groups; n += 4) some(std::integral_constant<int, 4>(), n);
  for (; n < groups; n++) some(std::integral_constant<int, 1>(), n);
}

// --- values --------------------------------------------------------------------------------------

// Values of a span by pairs of keys: of pages, and of a block [pair][dim].
template <class Cached>
struct ValuesAsTheyLie {
  static constexpr bool IS_BLOCK = false;
  const uint16_t* const* v;
  int dim;
  __m512i order = order_of_pairs();
  const uint16_t* row(unsigned pair) const {
    return v[pair / (GROUP / 2)] + (int64_t)(2 * pair % GROUP) * dim;
  }
  int64_t step() const { return 2 * dim; }
  int64_t ahead(unsigned pair) const {
    return v[pair / (GROUP / 2) + AHEAD] - v[pair / (GROUP / 2)];
  }
  BN_BF16 vi get(const uint16_t* row) const { return make_value_pair<Cached>(row, dim, order); }
};
struct ValuesInPairs {
  static constexpr bool IS_BLOCK = true;
  const int32_t* block;
  int first, dim;  // pair with which the block begins
  const int32_t* row(unsigned pair) const { return block + (int64_t)((int)pair - first) * dim; }
  int64_t step() const { return dim; }
  vi get(const int32_t* row) const { return (vi)_mm512_load_si512(row); }
};

// values[r] += p[r] · v for pairs of keys, ascending; W vectors of the head.
template <int R, int W, class V>
BN_BF16 inline void weigh(const int32_t* p, const V& v, Range pairs, int d, float* values) {
  const int dim = v.dim;
  __m512 sums[R][W];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int w = 0; w < W; w++)
      sums[r][w] = _mm512_loadu_ps(values + r * dim + d + w * LANES);
  for (int j = pairs.lo; j < pairs.hi;) {
    auto row = v.row(j) + d;
    int64_t ahead = 0;
    int stop = pairs.hi;
    if constexpr (!V::IS_BLOCK) {
      ahead = v.ahead(j);
      int end = j / (GROUP / 2) * (GROUP / 2) + GROUP / 2;
      stop = end < stop ? end : stop;
    }
    for (; j < stop; j++, row += v.step()) {
      if constexpr (!V::IS_BLOCK) {
        fetch(row + ahead);
        fetch(row + ahead + v.dim);
      }
      vi numbers[W];
      UNROLL for (int w = 0; w < W; w++) numbers[w] = v.get(row + w * LANES);
      UNROLL for (int r = 0; r < R; r++) {
        vi x = splat_i(p[r * SPAN + j]);
        UNROLL for (int w = 0; w < W; w++)
          sums[r][w] = _mm512_dpbf16_ps(sums[r][w], (__m512bh)x, (__m512bh)numbers[w]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int w = 0; w < W; w++)
      _mm512_storeu_ps(values + r * dim + d + w * LANES, sums[r][w]);
}
template <int R, class V>
BN_BF16 void weigh_head(const int32_t* p, const V& v, Range pairs, float* values) {
  int d = 0;
  for (; d + 4 * LANES <= v.dim; d += 4 * LANES) weigh<R, 4>(p, v, pairs, d, values);
  for (; d + 2 * LANES <= v.dim; d += 2 * LANES) weigh<R, 2>(p, v, pairs, d, values);
  for (; d < v.dim; d += LANES) weigh<R, 1>(p, v, pairs, d, values);
}
// One key of a pair, whose place in it `mask` tells.
template <class V>
BN_BF16 void weigh_one(const int32_t* p, int count, const V& v, int pair, int32_t mask,
                       float* values) {
  for (int d = 0; d < v.dim; d += LANES) {
    vi number = v.get(v.row(pair) + d) & splat_i(mask);
    for (int r = 0; r < count; r++) {
      float* to = values + (int64_t)r * v.dim + d;
      vi x = splat_i(p[r * SPAN + pair]);
      _mm512_storeu_ps(
          to, _mm512_dpbf16_ps(_mm512_loadu_ps(to), (__m512bh)x, (__m512bh)number));
    }
  }
}

// Up to TOGETHER queries with the same keys lo ... hi - 1.
template <class V>
void weigh_keys(const int32_t* p, int count, const V& v, Range keys, float* values) {
  using Weigh = void (*)(const int32_t*, const V&, Range, float*);
  constexpr Weigh WEIGH[] = {weigh_head<1, V>, weigh_head<2, V>, weigh_head<3, V>,
                             weigh_head<4, V>, weigh_head<5, V>, weigh_head<6, V>};
  if (keys.lo >= keys.hi) return;
  Range whole = {(keys.lo + 1) / 2, keys.hi / 2};
  if (keys.lo % 2) weigh_one(p, count, v, keys.lo / 2, (int32_t)0xffff0000, values);
  if (whole.lo < whole.hi) WEIGH[count - 1](p, v, whole, values);
  if (keys.hi % 2) weigh_one(p, count, v, keys.hi / 2, 0xffff, values);
}

// All queries of a tile over the keys of `block`, which begins and ends with whole pairs: together
// where all of some see both keys of a pair, and before and after those that see the same.
template <class V>
void weigh_all(const int32_t* p, int count, const Range* seen, Range block, const V& v,
               float* values) {
  int most = share_of(count);
  for (int first = 0; first < count; first += most) {
    int last = count - first < most ? count : first + most;
    Range common = block;
    for (int r = first; r < last; r++) common = meet(common, seen[r]);
    bool differ = false;
    for (int r = first + 1; r < last; r++)
      differ |= seen[r].lo != seen[first].lo || seen[r].hi != seen[first].hi;
    auto some = [&](int r, int end, Range keys) {
      weigh_keys(p + (int64_t)r * SPAN, end - r, v, keys, values + (int64_t)r * v.dim);
    };
    auto each = [&](auto&& keys_of) {
      for (int r = first, end; r < last; r = end) {
        for (end = r + 1; end < last && seen[end].lo == seen[r].lo && seen[end].hi == seen[r].hi;)
          end++;
        some(r, end, meet(block, keys_of(seen[r])));
      }
    };
    if (!differ) {
      some(first, last, common);
      continue;
    }
    common = {(common.lo + 1) / 2 * 2, common.hi / 2 * 2};
    if (common.lo >= common.hi) {
      each([](Range keys) { return keys; });
      continue;
    }
    each([&](Range keys) { return Range{keys.lo, common.lo}; });
    some(first, last, common);
    each([&](Range keys) { return Range{common.hi, keys.hi}; });
  }
}

// --- a span --------------------------------------------------------------------------------------

template <class Cached>
struct Rounded {
  using C = Cached;
  struct Room {
    int32_t* block;
    float *units, *q_units;
    int16_t* q;
    Room(const Tile& tile, int count, int dim) {
      block = (int32_t*)tile.room;
      units = (float*)(tile.room + block_bytes(dim));
      q_units = units + SPAN;
      q = (int16_t*)(q_units + count);
    }
  };
  static size_t block_bytes(int dim) {
    return sizeof(uint16_t) * GROUP * dim * groups_of_block(dim);
  }
  static size_t bytes(int count, int dim) {
    return block_bytes(dim) + sizeof(float) * (SPAN + count) + sizeof(int16_t) * count * dim;
  }

  static int rows_of_logits(int count) { return count; }

  static void take(const AttentionArgs& a, Tile& tile, int count, int r, const float* q) {
    Room room(tile, count, a.head_dim);
    room.q_units[r] = round_query(q, a.head_dim, a.scale, room.q + (size_t)r * a.head_dim);
  }

  static void score_some(const Room& room, const Groups<C>& of, int first, int groups, int count,
                         int dim, const Range* seen, float* logits) {
    using ScoreBlock = void (*)(const int32_t*, int, const int32_t*, int, const float*, float*);
    constexpr ScoreBlock SCORE[] = {score_block<1>, score_block<2>, score_block<3>,
                                    score_block<4>, score_block<5>, score_block<6>};
    int pairs = dim / 2;
    int64_t stride = of.stride(first);
    logits += first * GROUP;
    if (count <= TOGETHER)
      return score_few<C>(count, room.q, pairs, of.k + first, stride, groups, logits);
    float* units = room.units;
    for (int g = 0; g < groups; g++) {
      alignas(64) float factors[GROUP];
      const uint16_t *k = of.k[first + g], *then = of.k[first + g + AHEAD];
      find_units<C>(k, stride, dim, factors, units + g * GROUP);
      vf factor = load(factors);
      int32_t* to = room.block + (size_t)g * pairs * GROUP;
      for (int d = 0; d < pairs; d++, to += GROUP, k += 2 * stride, then += 2 * stride) {
        fetch(then);
        fetch(then + stride);
        _mm512_store_si512(to, (__m512i)make_pair<C>(k, stride, factor));
      }
    }
    int most = share_of(count);
    for (int r = 0; r < count; r += most) {
      int now = count - r < most ? count - r : most;
      const Range all = all_of(seen + r, now);
      int begin = all.lo / GROUP - first, end = (all.hi + GROUP - 1) / GROUP - first;
      begin = begin < 0 ? 0 : begin, end = end > groups ? groups : end;
      if (begin >= end) continue;
      SCORE[now - 1]((const int32_t*)(room.q + (size_t)r * dim), pairs,
                     room.block + (size_t)begin * pairs * GROUP, end - begin,
                     units + begin * GROUP, logits + (int64_t)r * SPAN + begin * GROUP);
    }
  }

  BN_BF16 static void fill_values(const Groups<C>& of, int first, int groups, int dim,
                                  int32_t* to) {
    const __m512i order = order_of_pairs();
    for (int g = first; g < first + groups; g++) {
      const uint16_t* row = of.v[g];
      int64_t ahead = of.v[g + AHEAD] - of.v[g];
      for (int i = 0; i < GROUP; i += 2, row += 2 * dim)
        for (int d = 0; d < dim; d += LANES, to += LANES) {
          fetch(row + d + ahead);
          fetch(row + d + dim + ahead);
          _mm512_store_si512(to, (__m512i)make_value_pair<C>(row + d, dim, order));
        }
    }
  }

  static void attend_span(const AttentionArgs& a, const Pages<C>& pages, int span, int count,
                          Tile& tile, const uint16_t* next) {
    int dim = a.head_dim, most = groups_of_block(dim);
    Room room(tile, count, dim);
    Groups<C> of(a, pages, span, count, tile, next);
    for (int g = of.begin, groups; g < of.end; g += groups) {
      groups = of.run(g, most);
      score_some(room, of, g, groups, count, dim, tile.seen, tile.logits);
    }
    for (int r = 0; r < count; r += SOFTENED) {
      int now = count - r < SOFTENED ? count - r : SOFTENED;
      soften_some(tile.logits + (size_t)r * SPAN, now, tile.seen + r,
                  chunks_of(all_of(tile.seen + r, now)), room.q_units + r, a.soft_cap,
                  tile.shares + r);
    }
    std::memset(tile.values, 0, sizeof(float) * count * dim);
    const int32_t* p = (const int32_t*)tile.logits;
    if (count <= TOGETHER)
      return weigh_all(p, count, tile.seen, {of.begin * GROUP, of.end * GROUP},
                       ValuesAsTheyLie<C>{of.v, dim}, tile.values);
    for (int g = of.begin, groups; g < of.end; g += groups) {
      groups = of.end - g < most ? of.end - g : most;
      fill_values(of, g, groups, dim, room.block);
      weigh_all(p, count, tile.seen, {g * GROUP, (g + groups) * GROUP},
                ValuesInPairs{room.block, g * GROUP / 2, dim}, tile.values);
    }
  }
};

}  // namespace

extern const Kernel attend_float16_pairs = attend_kernel<Rounded<Float16>>();
extern const Kernel attend_bfloat16_pairs = attend_kernel<Rounded<Bfloat16>>();

}  // namespace banyan
