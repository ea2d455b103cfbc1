// Attention for one instruction set. Included by attention_<set>.cpp, which names ATTENTION_TABLE.
//
// A unit is a tile of queries of one kv head. Per span of keys: logits of all its queries (vectors
// over 16 keys, several queries at once, sums over head_dim ascending), their exponentials, and the
// weighted sum of values (vectors over head_dim, keys ascending). Keys that a query may not see are
// cut off by ranges, never by zeros: what lies there may be anything.
#include <atomic>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "rows_curves.h"
#include "attention_cache.inl"

namespace banyan {
namespace {

constexpr int GROUPS = SPAN / GROUP;       // of a span
constexpr int BLOCK = 4;                   // groups that are converted, then used from the L1 cache
constexpr int VECTORS = GROUP / LANES;     // of a group
constexpr int TOGETHER = 6;                // queries whose sums are in registers at once
constexpr int AHEAD = 6;                   // groups that are fetched before they are needed
// Queries from which converting a block once pays: AVX2 converts as it loads, at no cost beside the
// products; AVX-512 converts on the ports that multiply, and plain code number by number.
constexpr int CONVERT_FROM = LANES == 8 ? 1 << 30 : LANES == 16 ? 30 : 12;
constexpr int WIDE = LANES == 16 ? 4 : 2;  // vectors of sums per query, for many queries

#define UNROLL _Pragma("GCC unroll 16")

// Into the second-level cache: more lines may be on their way there at a time than to the first.
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// sums[r][n] += factor(r) · vector(n). Of factors and vectors the fewer are kept in registers: more
// than these and the sums do not fit into 16.
template <int R, int N, class V, class F>
inline __attribute__((always_inline)) void multiply(V vector, F factor, vf (&sums)[R][N]) {
  if constexpr (R < N) {
    vf factors[R];
    UNROLL for (int r = 0; r < R; r++) factors[r] = factor(r);
    UNROLL for (int n = 0; n < N; n++) {
      vf v = vector(n);
      UNROLL for (int r = 0; r < R; r++) sums[r][n] = fma(factors[r], v, sums[r][n]);
    }
  } else {
    vf vectors[N];
    UNROLL for (int n = 0; n < N; n++) vectors[n] = vector(n);
    UNROLL for (int r = 0; r < R; r++) {
      vf f = factor(r);
      UNROLL for (int n = 0; n < N; n++) sums[r][n] = fma(f, vectors[n], sums[r][n]);
    }
  }
}

// --- logits --------------------------------------------------------------------------------------

// logits[r][n·16 ...] = q[r] · k for R queries and N groups of keys. Pointers to groups go AHEAD
// further than the groups that are asked for.
template <class C, int R, int N>
void score(const float* q, int dim, const typename C::type* const* k, int64_t stride,
           float* logits) {
  vf sums[R][N * VECTORS] = {};
  auto at = [&](int d, int n) { return C::get(k[n / VECTORS] + d * stride + n % VECTORS * LANES); };
  for (int d = 0; d < dim; d++) {
    UNROLL for (int n = 0; n < N; n++) fetch(k[n + AHEAD] + d * stride);
    multiply<R, N * VECTORS>([&](int n) { return at(d, n); },
                             [&](int r) { return splat(q[r * dim + d]); }, sums);
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int n = 0; n < N * VECTORS; n++) store(logits + r * SPAN + n * LANES, sums[r][n]);
}

template <class C, int R>
void score_groups(const float* q, int dim, const typename C::type* const* k, int64_t stride,
                  int groups, float* logits) {
  constexpr int VECTORS_AT_ONCE = R <= 3 ? 4 : WIDE;
  constexpr int N = VECTORS_AT_ONCE > VECTORS ? VECTORS_AT_ONCE / VECTORS : 1;
  int n = 0;
  for (; n + N <= groups; n += N) score<C, R, N>(q, dim, k + n, stride, logits + n * GROUP);
  for (; n < groups; n++) score<C, R, 1>(q, dim, k + n, stride, logits + n * GROUP);
}

// Queries that are taken together when `count` are there: even shares of at most TOGETHER.
inline int share_of(int count) {
  int shares = (count + TOGETHER - 1) / TOGETHER;
  return (count + shares - 1) / shares;
}

// Logits of `count` queries against groups of keys.
template <class C>
void score_all(const float* q, int count, int dim, const typename C::type* const* k, int64_t stride,
               int groups, float* logits) {
  using Score = void (*)(const float*, int, const typename C::type* const*, int64_t, int, float*);
  constexpr Score SCORE[] = {score_groups<C, 1>, score_groups<C, 2>, score_groups<C, 3>,
                             score_groups<C, 4>, score_groups<C, 5>, score_groups<C, 6>};
  int most = share_of(count);
  for (int r = 0; r < count; r += most) {
    int now = count - r < most ? count - r : most;
    SCORE[now - 1](q + (int64_t)r * dim, dim, k, stride, groups, logits + (int64_t)r * SPAN);
  }
}

// --- softmax -------------------------------------------------------------------------------------

// e^x for x <= 0, 0 below -86; NaN stays.
inline vf exp_below(vf x) {
  vi low = x < splat(-86.0f);
  vf clamped = max(splat(-86.0f), x);
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
  p = p * (vf)((n + 127) << 23);
  return (vf)((vi)p & ~low);
}

struct Share {
  float largest, sum;
};

// Lanes of a vector at `i` that are not lo ... hi - 1 become -infinity.
void cut_off(float* logits, int i, int lo, int hi) {
  vi at;
  for (int lane = 0; lane < LANES; lane++) at[lane] = i + lane;
  vi seen = (at >= splat_i(lo)) & (at < splat_i(hi));
  store(logits + i, choose(seen, load(logits + i), splat(-INFINITY)));
}

// Logits of the keys lo ... hi - 1 become exponentials. Where keys and values are 8 bits, logits are
// in units of k_scales, and each exponential is left in units of v_scales; otherwise both are null.
Share soften(float* logits, int lo, int hi, float soft_cap, const float* k_scales,
             const float* v_scales) {
  int begin = lo / LANES * LANES, end = (hi + LANES - 1) / LANES * LANES;
  if (k_scales)
    for (int i = begin; i < end; i += LANES)
      store(logits + i, load(logits + i) * load(k_scales + i));
  if (soft_cap != 0)
    for (int i = begin; i < end; i += LANES)
      store(logits + i, splat(soft_cap) * tanh(load(logits + i) / splat(soft_cap)));
  if (begin < lo) cut_off(logits, begin, lo, hi);
  if (end > hi) cut_off(logits, end - LANES, lo, hi);
  vf most = splat(-INFINITY), most_of_odd = most;
  int i = begin;
  for (; i + LANES < end; i += 2 * LANES) {
    most = max(load(logits + i), most);
    most_of_odd = max(load(logits + i + LANES), most_of_odd);
  }
  if (i < end) most = max(load(logits + i), most);
  float largest_logit = largest(max(most_of_odd, most));
  vf all{}, top = splat(largest_logit);
  for (i = begin; i < end; i += LANES) {
    vf p = exp_below(load(logits + i) - top);
    all += p;
    store(logits + i, v_scales ? p * load(v_scales + i) : p);
  }
  return {largest_logit, sum(all)};
}

// --- values --------------------------------------------------------------------------------------

// values[r] += p[r][j] · v[j] for the keys lo ... hi - 1, ascending; W vectors of the head.
template <class C, int R, int W>
void weigh(const float* p, const typename C::type* const* v, int lo, int hi, int dim,
           float* values) {
  vf sums[R][W];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int w = 0; w < W; w++) sums[r][w] = load(values + r * dim + w * LANES);
  for (int j = lo; j < hi;) {
    const typename C::type* row = v[j / GROUP] + j % GROUP * dim;
    int64_t ahead = v[j / GROUP + AHEAD] - v[j / GROUP];
    int stop = (j / GROUP + 1) * GROUP;
    if (stop > hi) stop = hi;
    for (; j < stop; j++, row += dim) {
      UNROLL for (int i = 0; i < W * LANES; i += 64 / sizeof *row) fetch(row + ahead + i);
      multiply<R, W>([&](int w) { return C::get(row + w * LANES); },
                     [&](int r) { return splat(p[r * SPAN + j]); }, sums);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int w = 0; w < W; w++) store(values + r * dim + w * LANES, sums[r][w]);
}

// The whole head, W vectors at a time and the rest one by one.
template <class C, int R>
void weigh_head(const float* p, const typename C::type* const* v, int lo, int hi, int dim,
                float* values) {
  constexpr int W = R == 1 ? 8 : R <= 3 ? 4 : WIDE;
  const typename C::type* shifted[GROUPS + AHEAD];
  int vectors = dim / LANES, w = 0;
  int first = lo / GROUP, last = (hi - 1) / GROUP;
  auto shift = [&] {
    for (int g = first; g <= last + AHEAD; g++) shifted[g] = v[g] + w * LANES;
  };
  for (; w + W <= vectors; w += W) {
    shift();
    weigh<C, R, W>(p, shifted, lo, hi, dim, values + w * LANES);
  }
  for (; w + 2 <= vectors; w += 2) {
    shift();
    weigh<C, R, 2>(p, shifted, lo, hi, dim, values + w * LANES);
  }
  for (; w < vectors; w++) {
    shift();
    weigh<C, R, 1>(p, shifted, lo, hi, dim, values + w * LANES);
  }
}

struct Range {
  int lo, hi;  // keys of a span that a query sees; empty when hi <= lo
};
inline Range meet(Range a, Range b) {
  return {a.lo > b.lo ? a.lo : b.lo, a.hi < b.hi ? a.hi : b.hi};
}

// All queries of a tile over the keys of `block`: together where all of them see a key, and each by
// itself before and after.
template <class C>
void weigh_all(const float* p, int count, const Range* seen, Range block,
               const typename C::type* const* v, int dim, float* values) {
  using Weigh = void (*)(const float*, const typename C::type* const*, int, int, int, float*);
  constexpr Weigh WEIGH[] = {weigh_head<C, 1>, weigh_head<C, 2>, weigh_head<C, 3>,
                             weigh_head<C, 4>, weigh_head<C, 5>, weigh_head<C, 6>};
  int most = share_of(count);
  for (int first = 0; first < count; first += most) {
    int now = count - first < most ? count - first : most;
    Range common = block;
    for (int r = first; r < first + now; r++) common = meet(common, seen[r]);
    auto alone = [&](int r, Range keys) {
      if (keys.lo < keys.hi)
        WEIGH[0](p + (int64_t)r * SPAN, v, keys.lo, keys.hi, dim, values + (int64_t)r * dim);
    };
    if (common.lo >= common.hi) {
      for (int r = first; r < first + now; r++) alone(r, meet(block, seen[r]));
      continue;
    }
    for (int r = first; r < first + now; r++)
      alone(r, meet(seen[r], {block.lo, common.lo}));
    WEIGH[now - 1](p + (int64_t)first * SPAN, v, common.lo, common.hi, dim,
                   values + (int64_t)first * dim);
    for (int r = first; r < first + now; r++)
      alone(r, meet(seen[r], {common.hi, block.hi}));
  }
}

// --- spans folded together -----------------------------------------------------------------------

// (total, values) and the next span's (share, more) become those of both.
void fold(Share& total, float* values, Share share, const float* more, int dim) {
  float most = total.largest > share.largest ? total.largest : share.largest;
  vf differences{};
  differences[0] = total.largest - most;
  differences[1] = share.largest - most;
  vf factors = exp(differences);
  total.sum = total.sum * factors[0] + share.sum * factors[1];
  total.largest = most;
  vf before = splat(factors[0]), after = splat(factors[1]);
  for (int d = 0; d < dim; d += LANES)
    store(values + d, fma(load(values + d), before, load(more + d) * after));
}

// Where folding begins: with nothing, or with the head's sink, whose value is zero.
inline Share beginning(const AttentionArgs& a, int head) {
  return a.sinks ? Share{a.sinks[head], 1.0f} : Share{-INFINITY, 0.0f};
}

void finish(const Share& total, const float* values, float* out, int dim, float unit) {
  vf factor = splat(unit / total.sum);
  for (int d = 0; d < dim; d += LANES) store(out + d, load(values + d) * factor);
}

float* result_of(const AttentionArgs& a, int64_t slot, int head) {
  return a.plan->results + (slot * a.kv_heads * a.group + head) * (a.head_dim + GROUP);
}

// Whoever brings the last span of a token folds all of them.
void fold_results(const AttentionArgs& a, const Query& query, int kv_head, float* values) {
  int spans = query.position / SPAN - first_seen(query.position, a.window) / SPAN + 1;
  std::atomic<int32_t>& arrived =
      *(std::atomic<int32_t>*)&a.plan->arrived[(int64_t)query.token * a.kv_heads + kv_head];
  if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < spans) return;
  arrived.store(0, std::memory_order_relaxed);  // for the next layer
  for (int head = kv_head * a.group; head < (kv_head + 1) * a.group; head++) {
    Share total = beginning(a, head);
    std::memset(values, 0, sizeof(float) * a.head_dim);
    for (int span = 0; span < spans; span++) {
      const float* result = result_of(a, query.slot + span, head);
      if (result[1] == 0.0f) continue;  // nothing was read there
      fold(total, values, {result[0], result[1]}, result + GROUP, a.head_dim);
    }
    int64_t row = (int64_t)query.token * a.kv_heads * a.group + head;
    finish(total, values, a.out + row * a.head_dim, a.head_dim, a.unit);
  }
}

// --- a unit --------------------------------------------------------------------------------------

// Working memory of a tile of `count` (token, head) pairs.
struct Tile {
  float *q, *logits, *values, *totals, *block, *scales;
  Share *shares, *sums;
  Range* seen;
  uint8_t* own;  // groups of a token that has a path

  Tile(Worker& worker, int count, int dim, size_t own_bytes) {
    size_t floats = (size_t)count * (3 * dim + SPAN) + (size_t)BLOCK * GROUP * dim + 2 * SPAN;
    size_t bytes = (floats * 4 + count * (2 * sizeof(Share) + sizeof(Range)) + 63) / 64 * 64;
    uint8_t* memory = worker.scratch(bytes + own_bytes);
    own = memory + bytes;
    q = (float*)memory;
    logits = q + (size_t)count * dim;
    values = logits + (size_t)count * SPAN;
    totals = values + (size_t)count * dim;
    block = totals + (size_t)count * dim;
    scales = block + (size_t)BLOCK * GROUP * dim;
    shares = (Share*)(scales + 2 * SPAN);
    sums = shares + count;
    seen = (Range*)(sums + count);
  }
};

// Groups of K as [16 tokens][head_dim] transposed, of V as they lie, in fp32.
template <class C>
void convert_k(const typename C::type* const* k, int64_t stride, int groups, int dim, float* block,
               const float** converted) {
  for (int g = 0; g < groups; g++) {
    float* to = block + (size_t)g * GROUP * dim;
    converted[g] = to;
    for (int d = 0; d < dim; d++) {
      fetch(k[g + AHEAD] + d * stride);
      UNROLL for (int i = 0; i < GROUP; i += LANES)
        store(to + d * GROUP + i, C::get(k[g] + d * stride + i));
    }
  }
  for (int g = 0; g < AHEAD; g++) converted[groups + g] = block;
}
template <class C>
void convert_v(const typename C::type* const* v, int groups, int dim, float* block,
               const float** converted) {
  for (int g = 0; g < groups; g++) {
    float* to = block + (size_t)g * GROUP * dim;
    converted[g] = to;
    for (int i = 0; i < GROUP * dim; i += LANES) {
      fetch(v[g + AHEAD] + i);
      store(to + i, C::get(v[g] + i));
    }
  }
  for (int g = 0; g < AHEAD; g++) converted[groups + g] = block;
}

// The groups of one kv head that hold the positions of a unit.
template <class C>
struct Pages {
  using T = typename C::type;
  const AttentionArgs& a;
  const int32_t* table;
  int kv_head;
  const int32_t* path;  // of the only query, or null

  Pages(const AttentionArgs& args, const Unit& unit, int head)
      : a(args),
        table(args.page_tables + unit.row * args.table_stride),
        kv_head(head),
        path(unit.num_queries == 1 ? args.plan->paths.of(args.plan->queries[unit.first_query].token)
                                   : nullptr) {}

  const T* page(const void* pages, int64_t position) const {
    int64_t at = (int64_t)table[position / a.page_size] * a.kv_heads + kv_head;
    return (const T*)pages + at * a.page_size * (a.head_dim + C::BESIDE);
  }
  const T* k(int64_t position) const {
    return page(a.k_pages, position) + position % a.page_size;
  }
  const T* v(int64_t position) const {
    return page(a.v_pages, position) + position % a.page_size * a.head_dim;
  }
  // Scales of a group of tokens in k_pages or v_pages.
  void copy_scales(const void* pages, int64_t position, float* to) const {
    const T* scales = page(pages, position) + a.page_size * a.head_dim;
    std::memcpy(to, scales + position % a.page_size * C::BESIDE, GROUP * sizeof(float));
    for (int i = 0; i < GROUP && path; i++) {
      int64_t place = this->place(position + i);
      const T* moved = page(pages, place) + a.page_size * a.head_dim;
      std::memcpy(to + i, moved + place % a.page_size * C::BESIDE, sizeof(float));
    }
  }

  // Where a position lies; behind the path, anywhere that may be read.
  int64_t place(int64_t position) const {
    return path && position <= position_of(path) ? place_of(path, position) : position;
  }
  bool is_own(int64_t position) const {
    return path && position + GROUP > base_of(path) && position <= position_of(path);
  }
  // A group whose tokens lie apart, as one: K as [head_dim][GROUP], V as [GROUP][head_dim].
  void gather(int64_t position, T* k_group, T* v_group) const {
    int dim = a.head_dim;
    const T* lying = k(position);
    for (int d = 0; d < dim; d++)
      std::memcpy(k_group + d * GROUP, lying + (int64_t)d * a.page_size, sizeof(T) * GROUP);
    std::memcpy(v_group, v(position), sizeof(T) * GROUP * dim);
    for (int i = 0; i < GROUP; i++) {
      int64_t at = place(position + i);
      if (at == position + i) continue;
      const T* from = k(at);
      for (int d = 0; d < dim; d++) k_group[d * GROUP + i] = from[(int64_t)d * a.page_size];
      std::memcpy(v_group + i * dim, v(at), sizeof(T) * dim);
    }
  }
};

// What a unit needs for groups of its own: those of a span.
template <class C>
size_t own_bytes(const Pages<C>& pages, int dim) {
  return pages.path ? 2 * sizeof(typename C::type) * SPAN * dim : 0;
}

// Shares and weighted values of every query of the tile in one span. next: what is read after it.
template <class C>
void attend_span(const AttentionArgs& a, const Pages<C>& pages, int span, int count, Tile& tile,
                 const typename C::type* next) {
  int dim = a.head_dim, lo = SPAN, hi = 0;
  for (int r = 0; r < count; r++) {
    if (tile.seen[r].lo >= tile.seen[r].hi) continue;
    lo = tile.seen[r].lo < lo ? tile.seen[r].lo : lo;
    hi = tile.seen[r].hi > hi ? tile.seen[r].hi : hi;
  }
  int begin = lo / GROUP, end = (hi + GROUP - 1) / GROUP;
  // K of the span, V of the span, and what comes then: the order in which memory is read.
  const typename C::type* order[2 * GROUPS + AHEAD];
  const typename C::type **k = order, **v = order + (end - begin);
  for (int g = begin; g < end; g++) {
    k[g] = pages.k((int64_t)span * SPAN + g * GROUP);
    v[g] = pages.v((int64_t)span * SPAN + g * GROUP);
  }
  for (int i = 0; i < AHEAD; i++) v[end + i] = next;
  int own = end;  // groups from here on are the query's own
  while (own > begin && pages.is_own((int64_t)span * SPAN + (own - 1) * GROUP)) own--;
  for (int g = own; g < end; g++) {
    auto* to = (typename C::type*)tile.own + (int64_t)(g - own) * 2 * GROUP * dim;
    pages.gather((int64_t)span * SPAN + g * GROUP, to, to + GROUP * dim);
    k[g] = to, v[g] = to + GROUP * dim;
  }
  bool converts = sizeof(*next) < sizeof(float) && count >= CONVERT_FROM;
  const float* converted[GROUPS + AHEAD];

  for (int g = begin, groups; g < end; g += groups) {
    int stop = g < own ? own : end;
    int64_t stride = g < own ? a.page_size : GROUP;
    groups = stop - g < BLOCK ? stop - g : BLOCK;
    float* logits = tile.logits + g * GROUP;
    if (converts) {
      convert_k<C>(k + g, stride, groups, dim, tile.block, converted);
      score_all<Float32>(tile.q, count, dim, converted, GROUP, groups, logits);
    } else {
      score_all<C>(tile.q, count, dim, k + g, stride, groups, logits);
    }
  }
  float *k_scales = nullptr, *v_scales = nullptr;
  if constexpr (C::BESIDE) {
    k_scales = tile.scales, v_scales = k_scales + SPAN;
    for (int g = begin; g < end; g++) {
      pages.copy_scales(a.k_pages, (int64_t)span * SPAN + g * GROUP, k_scales + g * GROUP);
      pages.copy_scales(a.v_pages, (int64_t)span * SPAN + g * GROUP, v_scales + g * GROUP);
    }
  }
  for (int r = 0; r < count; r++)
    if (tile.seen[r].lo < tile.seen[r].hi)
      tile.shares[r] = soften(tile.logits + (size_t)r * SPAN, tile.seen[r].lo, tile.seen[r].hi,
                              a.soft_cap, k_scales, v_scales);
  std::memset(tile.values, 0, sizeof(float) * count * dim);
  for (int g = begin; g < end; g += BLOCK) {
    int groups = end - g < BLOCK ? end - g : BLOCK;
    Range block = {g * GROUP, (g + groups) * GROUP};
    if (converts) {
      convert_v<C>(v + g, groups, dim, tile.block, converted + g);
      weigh_all<Float32>(tile.logits, count, tile.seen, block, converted, dim, tile.values);
    } else {
      weigh_all<C>(tile.logits, count, tile.seen, block, v, dim, tile.values);
    }
  }
}

template <class C>
void attend_unit(const AttentionArgs& a, const Unit& unit, int kv_head,
                 const typename C::type* next, Worker& worker) {
  const Query* queries = a.plan->queries + unit.first_query;
  int group = a.group, dim = a.head_dim, count = unit.num_queries * group;
  int64_t heads = (int64_t)a.kv_heads * group;
  Pages<C> pages(a, unit, kv_head);
  Tile tile(worker, count, dim, own_bytes(pages, dim));
  for (int r = 0; r < count; r++) {
    const float* q = a.q + queries[r / group].token * a.q_stride +
                     ((int64_t)kv_head * group + r % group) * dim;
    for (int d = 0; d < dim; d += LANES)
      store(tile.q + (size_t)r * dim + d, load(q + d) * splat(a.scale));
    tile.sums[r] = beginning(a, kv_head * group + r % group);
  }
  bool splits = queries[0].slot >= 0;
  if (!splits) std::memset(tile.totals, 0, sizeof(float) * count * dim);
  for (int span = unit.first_span; span < unit.end_span; span++) {
    for (int r = 0; r < count; r++) {
      int32_t position = queries[r / group].position;
      int32_t from = first_seen(position, a.window) - span * SPAN;
      tile.seen[r] = meet({from, position + 1 - span * SPAN}, {0, SPAN});
    }
    bool is_last = span + 1 == unit.end_span;
    attend_span<C>(a, pages, span, count, tile, is_last ? next : pages.k((span + 1) * SPAN));
    for (int r = 0; r < count; r++) {
      if (tile.seen[r].lo >= tile.seen[r].hi) continue;
      const float* values = tile.values + (size_t)r * dim;
      if (splits) {
        const Query& query = queries[r / group];
        int nth = span - first_seen(query.position, a.window) / SPAN;
        float* result = result_of(a, query.slot + nth, kv_head * group + r % group);
        result[0] = tile.shares[r].largest;
        result[1] = tile.shares[r].sum;
        std::memcpy(result + GROUP, values, sizeof(float) * dim);
      } else {
        fold(tile.sums[r], tile.totals + (size_t)r * dim, tile.shares[r], values, dim);
      }
    }
  }
  if (splits) {
    for (int t = 0; t < unit.num_queries; t++)
      if (tile.seen[t * group].lo < tile.seen[t * group].hi)
        fold_results(a, queries[t], kv_head, tile.totals);
    return;
  }
  for (int r = 0; r < count; r++) {
    int64_t row = queries[r / group].token * heads + (int64_t)kv_head * group + r % group;
    finish(tile.sums[r], tile.totals + (size_t)r * dim, a.out + row * dim, dim, a.unit);
  }
}

int64_t attend_units(const void* args, const Sizes&) {
  const AttentionArgs& a = *(const AttentionArgs*)args;
  return a.plan->num_units * a.kv_heads;
}
int64_t attend_grain(const void*, const Sizes&) { return 1; }

template <class C>
void attend(const void* args, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const AttentionArgs& a = *(const AttentionArgs*)args;
  auto unit = [&](int64_t i) -> const Unit& { return a.plan->units[i / a.kv_heads]; };
  auto head = [&](int64_t i) { return (int)(i % a.kv_heads); };
  for (int64_t i = begin; i < end; i++) {
    int64_t then = i + 1 < end ? i + 1 : i;
    int32_t position = a.plan->queries[unit(then).first_query].position;
    int64_t first = unit(then).first_span * SPAN;
    if (first < first_seen(position, a.window)) first = first_seen(position, a.window);
    attend_unit<C>(a, unit(i), head(i), Pages<C>(a, unit(then), head(then)).k(first), worker);
  }
}

template <class C>
void attend_cost(const void* args, const Sizes&, double* bytes, double* operations) {
  const AttentionArgs& a = *(const AttentionArgs*)args;
  *bytes = a.plan->keys * a.kv_heads * (a.head_dim + C::BESIDE) * 2.0 * sizeof(typename C::type);
  *operations = a.plan->pairs * a.kv_heads * a.group * a.head_dim * 4.0;
}

template <class C>
constexpr Kernel attend_kernel() {
  return {"paged_attention", attend_units, attend_grain, attend<C>, attend_cost<C>};
}

}  // namespace
}  // namespace banyan

#include "attention_latent.inl"
#include "attention_index.inl"

namespace banyan {

extern const AttentionKernels ATTENTION_TABLE = {
    {write_kernel<Float32>(), write_kernel<Float16>(), write_kernel<Bfloat16>(),
     write_kernel<Int8>(), write_kernel<Float8<4>>(), write_kernel<Float8<5>>()},
    {attend_kernel<Float32>(), attend_kernel<Float16>(), attend_kernel<Bfloat16>(),
     attend_kernel<Int8>(), attend_kernel<Float8<4>>(), attend_kernel<Float8<5>>()},
    {write_latent_kernel<Float32>(), write_latent_kernel<Float16>(),
     write_latent_kernel<Bfloat16>(), write_latent_kernel<Int8>(),
     write_latent_kernel<Float8<4>>(), write_latent_kernel<Float8<5>>()},
    {attend_latent_kernel<Float32>(), attend_latent_kernel<Float16>(),
     attend_latent_kernel<Bfloat16>(), attend_latent_kernel<Int8>(),
     attend_latent_kernel<Float8<4>>(), attend_latent_kernel<Float8<5>>()},
    {choose_kernel<Float32>(), choose_kernel<Float16>(), choose_kernel<Bfloat16>(),
     choose_kernel<Int8>(), choose_kernel<Float8<4>>(), choose_kernel<Float8<5>>()},
    LANES,
};

}  // namespace banyan
