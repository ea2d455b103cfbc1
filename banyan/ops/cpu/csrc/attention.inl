// Attention for one instruction set, in fp32. Compiled once per set, as BN_TABLE (FAMILIES of build.py).
//
// A unit is a tile of queries of one kv head. Per span of keys: logits of all its queries (vectors
// over 16 keys, several queries at once, sums over head_dim ascending), their exponentials, and the
// weighted sum of values (vectors over head_dim, keys ascending). Keys that a query may not see are
// cut off by ranges, never by zeros: what lies there may be anything.
#include "attention_spans.inl"

namespace banyan {
namespace {

constexpr int BLOCK = 4;                   // groups that are converted, then used from the L1 cache
constexpr int VECTORS = GROUP / LANES;     // of a group

// Queries from which converting a block once pays: AVX2 converts as it loads, at no cost beside the
// products; AVX-512 converts on the ports that multiply, and plain code number by number.
constexpr int CONVERT_FROM = LANES == 8 ? 1 << 30 : LANES == 16 ? 30 : 12;
constexpr int WIDE = LANES == 16 ? 4 : 2;  // vectors of sums per query, for many queries

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

// --- a span --------------------------------------------------------------------------------------

// fp32 throughout.
template <class Cached>
struct Exact {
  using C = Cached;
  using T = typename C::type;

  struct Room {
    float *q, *block, *scales;
    Room(const Tile& tile, int count, int dim) {
      q = (float*)tile.room;
      block = q + (size_t)count * dim;
      scales = block + (size_t)BLOCK * GROUP * dim;
    }
  };
  static size_t bytes(int count, int dim) {
    return sizeof(float) * ((size_t)count * dim + (size_t)BLOCK * GROUP * dim + 2 * SPAN);
  }

  static int rows_of_logits(int count) { return count; }

  static void take(const AttentionArgs& a, Tile& tile, int count, int r, const float* q) {
    float* to = Room(tile, count, a.head_dim).q + (size_t)r * a.head_dim;
    for (int d = 0; d < a.head_dim; d += LANES) store(to + d, load(q + d) * splat(a.scale));
  }

  static void attend_span(const AttentionArgs& a, const Pages<C>& pages, int span, int count,
                          Tile& tile, const T* next) {
    int dim = a.head_dim;
    Room room(tile, count, dim);
    Groups<C> of(a, pages, span, count, tile, next);
    bool converts = sizeof(T) < sizeof(float) && count >= CONVERT_FROM;
    const float* converted[GROUPS + AHEAD];

    for (int g = of.begin, groups; g < of.end; g += groups) {
      groups = of.run(g, BLOCK);
      float* logits = tile.logits + g * GROUP;
      if (converts) {
        convert_k<C>(of.k + g, of.stride(g), groups, dim, room.block, converted);
        score_all<Float32>(room.q, count, dim, converted, GROUP, groups, logits);
      } else {
        score_all<C>(room.q, count, dim, of.k + g, of.stride(g), groups, logits);
      }
    }
    float *k_scales = nullptr, *v_scales = nullptr;
    if constexpr (C::BESIDE) {
      k_scales = room.scales, v_scales = k_scales + SPAN;
      for (int g = of.begin; g < of.end; g++) {
        pages.copy_scales(a.k_pages, (int64_t)span * SPAN + g * GROUP, k_scales + g * GROUP);
        pages.copy_scales(a.v_pages, (int64_t)span * SPAN + g * GROUP, v_scales + g * GROUP);
      }
    }
    for (int r = 0; r < count; r++)
      if (tile.seen[r].lo < tile.seen[r].hi)
        tile.shares[r] = soften(tile.logits + (size_t)r * SPAN, tile.seen[r].lo, tile.seen[r].hi,
                                a.soft_cap, k_scales, v_scales);
    std::memset(tile.values, 0, sizeof(float) * count * dim);
    for (int g = of.begin; g < of.end; g += BLOCK) {
      int groups = of.end - g < BLOCK ? of.end - g : BLOCK;
      Range block = {g * GROUP, (g + groups) * GROUP};
      if (converts) {
        convert_v<C>(of.v + g, groups, dim, room.block, converted + g);
        weigh_all<Float32>(tile.logits, count, tile.seen, block, converted, dim, tile.values);
      } else {
        weigh_all<C>(tile.logits, count, tile.seen, block, of.v, dim, tile.values);
      }
    }
  }
};

}  // namespace
}  // namespace banyan

#include "attention_latent.inl"
#include "attention_index.inl"

namespace banyan {

extern const AttentionKernels BN_TABLE = {
    {write_kernel<Float32>(), write_kernel<Float16>(), write_kernel<Bfloat16>(),
     write_kernel<Int8>(), write_kernel<Float8<4>>(), write_kernel<Float8<5>>()},
    {attend_kernel<Exact<Float32>>(), attend_kernel<Exact<Float16>>(),
     attend_kernel<Exact<Bfloat16>>(), attend_kernel<Exact<Int8>>(),
     attend_kernel<Exact<Float8<4>>>(), attend_kernel<Exact<Float8<5>>>()},
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
