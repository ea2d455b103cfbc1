// What every arithmetic of attention shares, for one instruction set: shares of spans and their
// folding, the pages of a unit, and the walk of a unit over its spans. It writes no pages.
//
// An arithmetic is a class with the number type of the cache, C; `bytes`, what it needs beside the
// tile; `rows_of_logits`, of how many pairs it keeps logits; `take`, which brings in the query of a
// pair; and `attend_span`, which leaves shares and weighted values of every pair of the tile in one
// span.
#include <atomic>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "rows_curves.h"
#include "attention_cache.inl"

namespace banyan {
namespace {

constexpr int GROUPS = SPAN / GROUP;  // of a span
constexpr int TOGETHER = 6;           // queries whose sums are in registers at once
constexpr int AHEAD = 6;              // groups that are fetched before they are needed

#define UNROLL _Pragma("GCC unroll 16")

// Into the second-level cache: more lines may be on their way there at a time than to the first.
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

struct Range {
  int lo, hi;  // keys of a span that a query sees; empty when hi <= lo
};
inline Range meet(Range a, Range b) {
  return {a.lo > b.lo ? a.lo : b.lo, a.hi < b.hi ? a.hi : b.hi};
}
// From the first to the last key that any of `count` queries sees.
inline Range all_of(const Range* seen, int count) {
  Range all = {SPAN, 0};
  for (int r = 0; r < count; r++) {
    if (seen[r].lo >= seen[r].hi) continue;
    all.lo = seen[r].lo < all.lo ? seen[r].lo : all.lo;
    all.hi = seen[r].hi > all.hi ? seen[r].hi : all.hi;
  }
  return all;
}

struct Share {
  float largest, sum;
};

// Queries that are taken together when `count` are there: even shares of at most TOGETHER.
inline int share_of(int count) {
  int shares = (count + TOGETHER - 1) / TOGETHER;
  return (count + shares - 1) / shares;
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

// Working memory of a tile of `count` (token, head) pairs, with logits for `rows` of them.
struct Tile {
  float *logits, *values, *totals;
  Share *shares, *sums;
  Range* seen;
  uint8_t* room;  // of the arithmetic
  uint8_t* own;   // groups of a token that has a path

  Tile(Worker& worker, int count, int rows, int dim, size_t room_bytes, size_t own_bytes) {
    size_t floats = sizeof(float) * (2 * (size_t)count * dim + (size_t)rows * SPAN);
    size_t beside = count * (2 * sizeof(Share) + sizeof(Range));
    auto whole = [](size_t bytes) { return (bytes + 63) / 64 * 64; };
    uint8_t* memory = worker.scratch(whole(floats) + whole(beside) + whole(room_bytes) + own_bytes);
    logits = (float*)memory;
    values = logits + (size_t)rows * SPAN;
    totals = values + (size_t)count * dim;
    shares = (Share*)(memory + whole(floats));
    sums = shares + count;
    seen = (Range*)(sums + count);
    room = memory + whole(floats) + whole(beside);
    own = room + whole(room_bytes);
  }
};

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

// The groups of a span that some query of a tile sees, begin ... end - 1 of GROUPS.
template <class C>
struct Groups {
  using T = typename C::type;
  int begin, end;
  int own;           // from here on they are the query's own
  const T **k, **v;  // by group; AHEAD further than the last one of v too
  int64_t page_size;

  // next: what is read after it.
  Groups(const AttentionArgs& a, const Pages<C>& pages, int span, int count, const Tile& tile,
         const T* next)
      : page_size(a.page_size) {
    int dim = a.head_dim;
    const Range all = all_of(tile.seen, count);
    begin = all.lo / GROUP, end = (all.hi + GROUP - 1) / GROUP;
    // K of the span, V of the span, and what comes then: the order in which memory is read.
    k = order_, v = order_ + (end - begin);
    int64_t first = (int64_t)span * SPAN;
    for (int g = begin; g < end; g++) {
      k[g] = pages.k(first + g * GROUP);
      v[g] = pages.v(first + g * GROUP);
    }
    for (int i = 0; i < AHEAD; i++) v[end + i] = next;
    own = end;
    while (own > begin && pages.is_own(first + (own - 1) * GROUP)) own--;
    for (int g = own; g < end; g++) {
      T* to = (T*)tile.own + (int64_t)(g - own) * 2 * GROUP * dim;
      pages.gather(first + g * GROUP, to, to + GROUP * dim);
      k[g] = to, v[g] = to + GROUP * dim;
    }
  }
  // Elements from one number of a key to the next one.
  int64_t stride(int group) const { return group < own ? page_size : GROUP; }
  // Groups from `group` on that have one stride, at most `most`.
  int run(int group, int most) const {
    int stop = group < own ? own : end;
    return stop - group < most ? stop - group : most;
  }

 private:
  const T* order_[2 * GROUPS + AHEAD];
};

template <class A>
void attend_unit(const AttentionArgs& a, const Unit& unit, int kv_head,
                 const typename A::C::type* next, Worker& worker) {
  const Query* queries = a.plan->queries + unit.first_query;
  int group = a.group, dim = a.head_dim, count = unit.num_queries * group;
  int64_t heads = (int64_t)a.kv_heads * group;
  Pages<typename A::C> pages(a, unit, kv_head);
  Tile tile(worker, count, A::rows_of_logits(count), dim, A::bytes(count, dim),
            own_bytes(pages, dim));
  for (int r = 0; r < count; r++) {
    const float* q = a.q + queries[r / group].token * a.q_stride +
                     ((int64_t)kv_head * group + r % group) * dim;
    A::take(a, tile, count, r, q);
    tile.sums[r] = beginning(a, kv_head * group + r % group);
  }
  bool splits = queries[0].slot >= 0;
  if (!splits) std::memset(tile.totals, 0, sizeof(float) * count * dim);
  for (int span = unit.first_span; span < unit.end_span; span++) {
    for (int r = 0; r < count; r++) {
      const Query& query = queries[r / group];
      int32_t from = first_seen(query.position, a.window) - span * SPAN;
      tile.seen[r] = meet({from, query.end - span * SPAN}, {0, SPAN});
    }
    bool is_last = span + 1 == unit.end_span;
    A::attend_span(a, pages, span, count, tile, is_last ? next : pages.k((span + 1) * SPAN));
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

template <class A>
void attend(const void* args, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const AttentionArgs& a = *(const AttentionArgs*)args;
  auto unit = [&](int64_t i) -> const Unit& { return a.plan->units[i / a.kv_heads]; };
  auto head = [&](int64_t i) { return (int)(i % a.kv_heads); };
  for (int64_t i = begin; i < end; i++) {
    int64_t then = i + 1 < end ? i + 1 : i;
    int32_t position = a.plan->queries[unit(then).first_query].position;
    int64_t first = unit(then).first_span * SPAN;
    if (first < first_seen(position, a.window)) first = first_seen(position, a.window);
    Pages<typename A::C> pages(a, unit(then), head(then));
    attend_unit<A>(a, unit(i), head(i), pages.k(first), worker);
  }
}

template <class C>
void attend_cost(const void* args, const Sizes&, double* bytes, double* operations) {
  const AttentionArgs& a = *(const AttentionArgs*)args;
  *bytes = a.plan->keys * a.kv_heads * (a.head_dim + C::BESIDE) * 2.0 * sizeof(typename C::type);
  *operations = a.plan->pairs * a.kv_heads * a.group * a.head_dim * 4.0;
}

template <class A>
constexpr Kernel attend_kernel() {
  return {"paged_attention", attend_units, attend_grain, attend<A>, attend_cost<typename A::C>};
}

}  // namespace
}  // namespace banyan
