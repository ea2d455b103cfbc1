// Latent attention for one instruction set. Included by attention.inl, whose spans, exponentials and
// folding it shares.
//
// All heads read the same keys, so vectors run over the (token, head) pairs of a unit for q·k: a
// number of a key meets the same number of all queries, whose sums go over the latent in ascending
// order, then over the turned key. Values are the latents; vectors run over them as in attention.
namespace banyan {
namespace {

constexpr int KEYS_OF_BLOCK = BLOCK * GROUP;

int up_to_vectors(int n) { return (n + LANES - 1) / LANES * LANES; }

// Working memory of a unit of `count` pairs.
struct LatentTile {
  int pairs;                   // up to whole vectors
  float *q, *logits;           // [rank + rope_dim][pairs], [pairs][SPAN]
  float *values, *totals;      // [count][head_dim]
  float *latents, *keys;       // [KEYS_OF_BLOCK][head_dim], [GROUP][rope_dim up to whole vectors]
  Share *shares, *sums;
  Range* seen;

  LatentTile(Worker& worker, const LatentArgs& a, int count) : pairs(up_to_vectors(count)) {
    size_t dim = a.of.head_dim, turned = up_to_vectors(a.rope_dim);
    size_t floats = (size_t)pairs * (a.rank + a.rope_dim + SPAN) + 2 * count * dim +
                    KEYS_OF_BLOCK * dim + GROUP * turned;
    uint8_t* memory = worker.scratch(floats * 4 + count * (2 * sizeof(Share) + sizeof(Range)));
    q = (float*)memory;
    logits = q + (size_t)pairs * (a.rank + a.rope_dim);
    values = logits + (size_t)pairs * SPAN;
    totals = values + count * dim;
    latents = totals + count * dim;
    keys = latents + KEYS_OF_BLOCK * dim;
    shares = (Share*)(keys + GROUP * turned);
    sums = shares + count;
    seen = (Range*)(sums + count);
  }
};

// A row of a page as fp32, with zeros up to a whole vector.
template <class C>
inline void widen_row(const typename C::type* row, int n, float* to) {
  vf scale = splat(1.0f);
  if constexpr (C::BESIDE != 0) {
    float unit;
    std::memcpy(&unit, row + n, sizeof unit);
    scale = splat(unit);
  }
  auto put = [&](float* at, vf v) { store(at, C::BESIDE ? v * scale : v); };
  int d = 0;
  for (; d + LANES <= n; d += LANES) put(to + d, C::get(row + d));
  if (d == n) return;
  typename C::type rest[LANES] = {};
  std::memcpy(rest, row + d, sizeof(typename C::type) * (n - d));
  put(to + d, C::get(rest));
}

template <class C>
struct LatentPages {
  using T = typename C::type;
  const LatentArgs& a;
  const int32_t* table;
  const int32_t* path;  // of the only query, or null

  const T* row(const void* pages, int n, int64_t position) const {
    position = place_of(path, position);
    int64_t page = table[position / a.of.page_size], offset = position % a.of.page_size;
    return (const T*)pages + (page * a.of.page_size + offset) * (n + C::BESIDE);
  }
  const T* latent(int64_t position) const { return row(a.of.k_pages, a.rank, position); }
  const T* key(int64_t position) const { return row(a.of.v_pages, a.rope_dim, position); }
};

// logits[pair][key] of K keys and N vectors of pairs. latents and keys lie `dim` and `turned` apart.
template <int K, int N>
void score_latents(const float* q, int pairs, const float* latents, int rank, int dim,
                   const float* keys, int rope_dim, int turned, float* logits) {
  vf sums[K][N] = {};
  auto add = [&](const float* numbers, int64_t apart, int count) {
    for (int d = 0; d < count; d++, q += pairs) {
      vf v[N];
      UNROLL for (int n = 0; n < N; n++) v[n] = load(q + n * LANES);
      UNROLL for (int k = 0; k < K; k++) {
        vf number = splat(numbers[k * apart + d]);
        UNROLL for (int n = 0; n < N; n++) sums[k][n] = fma(number, v[n], sums[k][n]);
      }
    }
  };
  add(latents, dim, rank);
  add(keys, turned, rope_dim);
  float some[K][N * LANES];
  for (int k = 0; k < K; k++)
    for (int n = 0; n < N; n++) store(some[k] + n * LANES, sums[k][n]);
  for (int pair = 0; pair < N * LANES; pair++)
    for (int k = 0; k < K; k++) logits[pair * SPAN + k] = some[k][pair];
}

// Logits of all pairs against `count` keys.
template <int N>
void score_block(const LatentArgs& a, const LatentTile& tile, int vector, int count,
                 float* logits) {
  constexpr int K = N == 1 ? 8 : 4;
  int dim = a.of.head_dim, turned = up_to_vectors(a.rope_dim), key = 0;
  auto go = [&](auto run) {
    run(tile.q + vector * LANES, tile.pairs, tile.latents + (int64_t)key * dim, a.rank, dim,
        tile.keys + key * turned, a.rope_dim, turned, logits + vector * LANES * SPAN + key);
  };
  for (; key + K <= count; key += K) go(score_latents<K, N>);
  for (; key < count; key++) go(score_latents<1, N>);
}

// From the first to behind the last position that a token reads within a range of a span.
Range chosen_of(const int32_t* words, int64_t first, Range range) {
  auto reads = [&](int i) { return words[(first + i) / 32] >> (first + i) % 32 & 1; };
  while (range.lo < range.hi && !reads(range.lo)) range.lo++;
  while (range.lo < range.hi && !reads(range.hi - 1)) range.hi--;
  return range;
}

// Logits of positions that a token does not read become -infinity.
void leave_out(const int32_t* words, int64_t first, Range range, float* logits) {
  for (int i = range.lo; i < range.hi; i++)
    if (!(words[(first + i) / 32] >> (first + i) % 32 & 1)) logits[i] = -INFINITY;
}

template <class C>
void attend_latent_span(const LatentArgs& a, const LatentPages<C>& pages, int span, int count,
                        const Query* queries, LatentTile& tile) {
  int dim = a.of.head_dim, turned = up_to_vectors(a.rope_dim), hi = 0;
  for (int r = 0; r < count; r++) hi = tile.seen[r].hi > hi ? tile.seen[r].hi : hi;
  int64_t first = (int64_t)span * SPAN;
  for (int key = 0; key < hi; key += GROUP) {
    int keys = hi - key < GROUP ? hi - key : GROUP;
    for (int i = 0; i < keys; i++) {
      widen_row<C>(pages.latent(first + key + i), a.rank, tile.latents + (int64_t)i * dim);
      widen_row<C>(pages.key(first + key + i), a.rope_dim, tile.keys + i * turned);
    }
    int vectors = tile.pairs / LANES, v = 0;
    for (; v + 3 <= vectors; v += 3) score_block<3>(a, tile, v, keys, tile.logits + key);
    for (; v + 2 <= vectors; v += 2) score_block<2>(a, tile, v, keys, tile.logits + key);
    for (; v < vectors; v++) score_block<1>(a, tile, v, keys, tile.logits + key);
  }
  for (int r = 0; a.chosen && r < count; r++)
    leave_out(a.chosen + queries[r / a.of.group].token * a.words, first, tile.seen[r],
              tile.logits + (size_t)r * SPAN);
  for (int r = 0; r < count; r++)
    if (tile.seen[r].lo < tile.seen[r].hi)
      tile.shares[r] = soften(tile.logits + (size_t)r * SPAN, tile.seen[r].lo, tile.seen[r].hi,
                              0.0f, nullptr, nullptr);
  std::memset(tile.values, 0, sizeof(float) * count * dim);
  const float* groups[GROUPS + AHEAD];
  for (int key = 0; key < hi; key += KEYS_OF_BLOCK) {
    Range block = {key, hi < key + KEYS_OF_BLOCK ? hi : key + KEYS_OF_BLOCK};
    for (int i = block.lo; i < block.hi; i++)
      widen_row<C>(pages.latent(first + i), a.rank, tile.latents + (int64_t)(i - key) * dim);
    for (int g = 0; g < BLOCK + AHEAD; g++)
      groups[key / GROUP + g] = tile.latents + (int64_t)(g < BLOCK ? g : 0) * GROUP * dim;
    weigh_all<Float32>(tile.logits, count, tile.seen, block, groups, dim, tile.values);
  }
}

// Queries of a unit as [rank + rope_dim][pairs], scaled, with zeros up to whole vectors.
void gather_queries(const LatentArgs& a, const Query* queries, int first_head, int count,
                    LatentTile& tile) {
  int group = a.of.group;
  std::memset(tile.q, 0, sizeof(float) * tile.pairs * (a.rank + a.rope_dim));
  for (int r = 0; r < count; r++) {
    int64_t token = queries[r / group].token, head = first_head + r % group;
    const float* q = a.of.q + token * a.of.q_stride + head * a.rank;
    const float* turned = a.q_turned + token * a.turned_stride + head * a.rope_dim;
    float* to = tile.q + r;
    for (int d = 0; d < a.rank; d++, to += tile.pairs) *to = q[d] * a.of.scale;
    for (int d = 0; d < a.rope_dim; d++, to += tile.pairs) *to = turned[d] * a.of.scale;
  }
}

template <class C>
void attend_latent_unit(const LatentArgs& a, const Unit& unit, int block, Worker& worker) {
  const AttentionArgs& of = a.of;
  const Query* queries = of.plan->queries + unit.first_query;
  int group = of.group, dim = of.head_dim, count = unit.num_queries * group;
  LatentTile tile(worker, a, count);
  gather_queries(a, queries, block * group, count, tile);
  for (int r = 0; r < count; r++) tile.sums[r] = {-INFINITY, 0.0f};
  // What no row of a page fills up to a whole vector counts as zero.
  std::memset(tile.latents, 0, sizeof(float) * KEYS_OF_BLOCK * dim);
  bool splits = queries[0].slot >= 0;
  if (!splits) std::memset(tile.totals, 0, sizeof(float) * count * dim);
  const int32_t* path = unit.num_queries == 1 ? of.plan->paths.of(queries[0].token) : nullptr;
  LatentPages<C> pages{a, of.page_tables + unit.row * of.table_stride, path};
  for (int span = unit.first_span; span < unit.end_span; span++) {
    for (int r = 0; r < count; r++) {
      int32_t position = queries[r / group].position;
      int32_t from = first_seen(position, of.window) - span * SPAN;
      tile.seen[r] = meet({from, position + 1 - span * SPAN}, {0, SPAN});
    }
    for (int r = 0; a.chosen && r < count; r++)
      tile.seen[r] = chosen_of(a.chosen + queries[r / group].token * a.words,
                               (int64_t)span * SPAN, tile.seen[r]);
    attend_latent_span<C>(a, pages, span, count, queries, tile);
    for (int r = 0; r < count; r++) {
      if (tile.seen[r].lo >= tile.seen[r].hi) {
        if (splits)
          result_of(of, queries[r / group].slot + span, block * group + r % group)[1] = 0.0f;
        continue;
      }
      const float* values = tile.values + (size_t)r * dim;
      if (splits) {
        float* result = result_of(of, queries[r / group].slot + span, block * group + r % group);
        result[0] = tile.shares[r].largest;
        result[1] = tile.shares[r].sum;
        std::memcpy(result + GROUP, values, sizeof(float) * dim);
      } else {
        fold(tile.sums[r], tile.totals + (size_t)r * dim, tile.shares[r], values, dim);
      }
    }
  }
  if (splits) {
    for (int t = 0; t < unit.num_queries; t++) fold_results(of, queries[t], block, tile.totals);
    return;
  }
  for (int r = 0; r < count; r++) {
    int64_t row = (int64_t)queries[r / group].token * of.kv_heads * group + block * group + r % group;
    finish(tile.sums[r], tile.totals + (size_t)r * dim, of.out + row * dim, dim, 1.0f);
  }
}

int64_t attend_latent_units(const void* args, const Sizes& sizes) {
  return attend_units(&((const LatentArgs*)args)->of, sizes);
}

template <class C>
void attend_latent(const void* args, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const LatentArgs& a = *(const LatentArgs*)args;
  for (int64_t i = begin; i < end; i++)
    attend_latent_unit<C>(a, a.of.plan->units[i / a.of.kv_heads], (int)(i % a.of.kv_heads), worker);
}

template <class C>
void attend_latent_cost(const void* args, const Sizes&, double* bytes, double* operations) {
  const LatentArgs& a = *(const LatentArgs*)args;
  *bytes = a.of.plan->keys * (a.rank + a.rope_dim + 2 * C::BESIDE) * sizeof(typename C::type);
  *operations = a.of.plan->pairs * a.of.kv_heads * a.of.group * (4.0 * a.rank + 2.0 * a.rope_dim);
}

template <class C>
constexpr Kernel attend_latent_kernel() {
  return {"latent_attention", attend_latent_units, attend_grain, attend_latent<C>,
          attend_latent_cost<C>};
}

// --- writing -------------------------------------------------------------------------------------

template <class C>
void write_row(const float* x, int n, int64_t location, void* pages, float* padded) {
  using T = typename C::type;
  int dim = up_to_vectors(n);
  T* row = (T*)pages + location * (n + C::BESIDE);
  T* stored = (T*)(padded + dim);
  std::memset(padded, 0, sizeof(float) * dim);
  std::memcpy(padded, x, sizeof(float) * n);
  float scale = 0.0f;
  put_head<C>(padded, dim, stored, 1, &scale, 1.0f);
  std::memcpy(row, stored, sizeof(T) * n);
  if (C::BESIDE) std::memcpy(row + n, &scale, sizeof scale);
}

template <class C>
void write_latent(const void* args, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const WriteLatentArgs& a = *(const WriteLatentArgs*)args;
  int most = a.rank > a.rope_dim ? a.rank : a.rope_dim;
  float* padded = (float*)worker.scratch(sizeof(float) * 2 * up_to_vectors(most));
  for (int64_t token = begin; token < end; token++) {
    const float* latent = a.latent + token * a.latent_stride;
    const float* key = a.key + token * a.key_stride;
    write_row<C>(latent, a.rank, a.locations[token], a.latent_pages, padded);
    write_row<C>(key, a.rope_dim, a.locations[token], a.key_pages, padded);
  }
}
int64_t write_latent_grain(const void* args, const Sizes&) {
  const WriteLatentArgs& a = *(const WriteLatentArgs*)args;
  return 4096 / (a.rank + a.rope_dim) + 1;
}
template <class C>
void write_latent_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const WriteLatentArgs& a = *(const WriteLatentArgs*)args;
  double numbers = a.rank + a.rope_dim, stored = numbers + 2 * C::BESIDE;
  *bytes = (double)sizes.n[TOKENS] * (4 * numbers + stored * sizeof(typename C::type));
  *operations = 0;
}

template <class C>
constexpr Kernel write_latent_kernel() {
  return {"write_latent", write_units, write_latent_grain, write_latent<C>, write_latent_cost<C>};
}

}  // namespace
}  // namespace banyan
