// Attention on rounded numbers with tile registers, for pages of 16-bit floats.
//
// q·k: the integers of attention_pairs.inl as two bytes each, whose products are added exactly and
// put together: the sums that vectors find. p·v: exponentials
// and values are rounded to bf16 and added in fp32, in chunks of CHUNK keys at absolute positions,
// ascending; the sum that divides them is that of the rounded exponentials. Within a chunk a key that
// a query does not see counts as zero times its value, and one that no query of the tile sees has
// zeros for its values: what lies there may be anything. Values that are not finite are found by what
// they make of the results, and then treated apart. Up to TOGETHER queries go by vectors.
//
// A row of a register adds the same numbers in the same order whatever the other rows are, and vectors
// can do what it does.
#include "attention_pairs_tiles.inl"

namespace banyan {
namespace {

// --- a span --------------------------------------------------------------------------------------

// One span of a tile at work. Up to ROWS queries, which memory holds up, use a group of keys and a
// chunk of values while the next one is made; for more of them the whole span is made first.
template <class C>
class Span {
 public:
  // What lies in the room of a tile.
  struct Room {
    float *q_units, *units;        // [count], [SPAN]
    uint8_t* q;                    // [count][bytes_of_query], or integers [count][dim]
    uint8_t *keys, *sums, *values;
    float* p;                      // [count][SPAN] of vectors
    Room(uint8_t* memory, int count, int dim) {
      auto part = [&](int64_t bytes) {
        uint8_t* at = memory;
        memory += (bytes + 63) / 64 * 64;
        return at;
      };
      q_units = (float*)part(sizeof(float) * count);
      units = (float*)part(sizeof(float) * SPAN);
      q = part((int64_t)count * bytes_of_query(dim));
      keys = part(groups_kept(count) * group_bytes(dim));
      sums = part(has_vectors(count) ? 0 : 2 * PLACES * TILE_BYTES);
      values = part(chunks_kept(count) * chunk_bytes(dim));
      p = (float*)part(has_vectors(count) ? sizeof(float) * count * SPAN : 0);
      end = memory;
    }
    const uint8_t* end;
  };
  static bool has_vectors(int count) { return count <= TOGETHER; }

  Span(const AttentionArgs& a, const Groups<C>& groups, int count, const Tile& tile)
      : a_(a),
        of_(groups),
        tile_(tile),
        room_(tile.room, count, a.head_dim),
        dim_(a.head_dim),
        count_(count),
        seen_(all_of(tile.seen, count)) {}

  void attend() {
    if (count_ <= ROWS) {
      if (has_vectors(count_))
        score_few();
      else
        for (int g = of_.begin; g <= of_.end; g++) {
          if (g < of_.end) fill_keys(g);
          if (g > of_.begin) score_rows(0, {g - 1, g});
        }
      soften_rows(0);
      if (has_vectors(count_)) widen_exponentials();
      weigh_finite(0);
      return;
    }
    for (int g = of_.begin; g < of_.end; g++) fill_keys(g);
    fill_span();
    for (int r = 0; r < count_; r += rows_from(r)) {
      const Range own = own_of(r);
      score_rows(r, {own.lo / GROUP, (own.hi + GROUP - 1) / GROUP});
      soften_rows(r);
      weigh_finite(r);
    }
  }

 private:
  static int groups_kept(int count) {
    return has_vectors(count) ? 0 : count > ROWS ? GROUPS : 2;
  }
  static int chunks_kept(int count) {
    return has_vectors(count) ? 0 : count > ROWS ? SPAN / CHUNK : 2;
  }
  static int64_t group_bytes(int dim) { return (int64_t)steps_of(dim) * 2 * TILE_BYTES; }
  static int64_t chunk_bytes(int dim) { return (int64_t)dim / WIDTH * TILE_BYTES; }
  uint8_t* keys(int group) const {
    return room_.keys + group % groups_kept(count_) * group_bytes(dim_);
  }
  uint8_t* values(int chunk) const {
    return room_.values + chunk % chunks_kept(count_) * chunk_bytes(dim_);
  }
  // Two whole blocks, or one.
  int rows_from(int r) const {
    int left = count_ - r;
    return left >= AT_ONCE ? AT_ONCE : left < ROWS ? left : ROWS;
  }
  float* sums(int r) const { return tile_.values + (int64_t)r * dim_; }
  float* logits(int r) const { return tile_.logits + (int64_t)(r % AT_ONCE) * SPAN; }
  Range own_of(int r) const { return all_of(tile_.seen + r, rows_from(r)); }

  void fill_keys(int group) {
    split_keys<C>(of_.k[group], of_.k[group + AHEAD], of_.stride(group), dim_,
                  room_.units + group * GROUP, keys(group));
  }
  void fill_values(int chunk) {
    uint8_t* to = values(chunk);
    const int begin = chunk * CHUNK;
    for (int i = begin; i < begin + CHUNK; i += 2, to += 64) {
      if (i + 1 < seen_.lo || i >= seen_.hi) {
        for (int n = 0; n < dim_ / WIDTH; n++)
          _mm512_store_si512(to + n * TILE_BYTES, _mm512_setzero_si512());
        continue;
      }
      const uint16_t *group = of_.v[i / GROUP], *row = group + i % GROUP * dim_;
      pair_values<C>(row, row + (of_.v[i / GROUP + AHEAD] - group), i, seen_, dim_, finite_only_,
                     to);
    }
  }
  void fill_span() {
    const Range chunks = chunks_of(seen_);
    for (int c = chunks.lo; c < chunks.hi; c++) fill_values(c);
  }

  void score_few() {
    for (int g = of_.begin, groups; g < of_.end; g += groups) {
      groups = of_.run(g, GROUPS);
      banyan::score_few<C>(count_, (const int16_t*)room_.q, dim_ / 2, of_.k + g, of_.stride(g),
                           groups, tile_.logits + g * GROUP);
    }
  }
  void score_rows(int r, Range groups) {
    const int rows = rows_from(r), steps = steps_of(dim_);
    const uint8_t* q = room_.q + (int64_t)r * bytes_of_query(dim_);
    registers_.take(rows < ROWS ? rows : ROWS);
    for (int g = groups.lo; g < groups.hi; g++) {
      if (rows > ROWS)
        multiply<2>(q, steps, keys(g), room_.sums);
      else
        multiply<1>(q, steps, keys(g), room_.sums);
      put_together(room_.sums, rows, room_.units + g * GROUP, logits(r) + g * GROUP);
    }
  }

  void soften_rows(int first) {
    const int end = first + rows_from(first);
    const Range chunks = chunks_of(own_of(first));
    for (int r = first; r < end; r += SOFTENED) {
      registers_.keep_awake();
      soften_some(logits(r), end - r < SOFTENED ? end - r : SOFTENED, tile_.seen + r, chunks,
                  room_.q_units + r, a_.soft_cap, tile_.shares + r);
    }
    for (int r = first; r < end && chunks.lo < chunks.hi; r++)
      if (tile_.seen[r].lo >= tile_.seen[r].hi)
        std::memset((uint16_t*)logits(r) + chunks.lo * CHUNK, 0,
                    sizeof(uint16_t) * CHUNK * (chunks.hi - chunks.lo));
  }

  void widen_exponentials() {
    const Range chunks = chunks_of(seen_);
    for (int r = 0; r < count_; r++)
      for (int i = chunks.lo * CHUNK; i < chunks.hi * CHUNK; i += LANES)
        store(room_.p + r * SPAN + i, load_bf16((const uint16_t*)logits(r) + i));
  }

  // Values that are not finite make results that are not: only then they are treated apart.
  void weigh_finite(int r) {
    weigh_all(r);
    if (!finite_only_ && has_not_finite(r)) {
      finite_only_ = true;
      if (count_ > ROWS) fill_span();
      weigh_all(r);
    }
    if (finite_only_) add_not_finite(r);
  }
  void weigh_all(int r) {
    if (count_ > ROWS) return weigh_rows(r, chunks_of(own_of(r)), true);
    if (has_vectors(count_))
      return weigh_few(count_, room_.p, of_, seen_, dim_, finite_only_, tile_.values);
    const Range chunks = chunks_of(seen_);
    for (int c = chunks.lo; c <= chunks.hi; c++) {
      if (c < chunks.hi) fill_values(c);
      if (c > chunks.lo) weigh_rows(r, {c - 1, c}, c - 1 == chunks.lo);
    }
  }
  void weigh_rows(int r, Range chunks, bool is_first) {
    using Weigh = void (*)(const float*, const uint8_t*, int, int64_t, bool, int, float*);
    constexpr Weigh WEIGH[2][2] = {{weigh<1, 1>, weigh<1, 2>}, {weigh<2, 1>, weigh<2, 2>}};
    const int rows = rows_from(r);
    registers_.take(rows < ROWS ? rows : ROWS);
    for (int d = 0; d < dim_; d += 2 * WIDTH)
      WEIGH[rows > ROWS][d + WIDTH < dim_](
          logits(r) + chunks.lo * CHUNK / 2, values(chunks.lo) + d / WIDTH * TILE_BYTES,
          chunks.hi - chunks.lo, chunk_bytes(dim_), is_first, dim_, sums(r) + d);
  }

  bool has_not_finite(int r) const {
    __mmask16 odd = 0;
    for (int i = 0; i < rows_from(r) * dim_; i += LANES) odd |= not_finite(load(sums(r) + i));
    return odd;
  }
  // What values that are not finite add to the sums of the queries that see them.
  void add_not_finite(int first) {
    for (int key = seen_.lo; key < seen_.hi; key++)
      for (int d = 0; d < dim_; d += LANES) {
        vf v = C::get(of_.v[key / GROUP] + key % GROUP * dim_ + d);
        __mmask16 odd = not_finite(v);
        for (int r = first; r < first + rows_from(first) && odd; r++) {
          if (key < tile_.seen[r].lo || key >= tile_.seen[r].hi) continue;
          vf p = splat(from_bf16(((const uint16_t*)logits(r))[key]));
          float* to = sums(r) + d;
          _mm512_mask_storeu_ps(to, odd, (__m512)(load(to) + p * v));
        }
      }
  }

  const AttentionArgs& a_;
  const Groups<C>& of_;
  const Tile& tile_;
  const Room room_;
  const int dim_, count_;
  const Range seen_;  // by any query
  bool finite_only_ = false;
  Registers registers_;
};

template <class Cached>
struct Rounded {
  using C = Cached;
  using Room = typename Span<C>::Room;
  static size_t bytes(int count, int dim) { return Room(nullptr, count, dim).end - (uint8_t*)0; }
  static int rows_of_logits(int count) { return count < AT_ONCE ? count : AT_ONCE; }
  static void take(const AttentionArgs& a, Tile& tile, int count, int r, const float* q) {
    const int dim = a.head_dim;
    const Room room(tile.room, count, dim);
    uint8_t* to = room.q + (int64_t)r * bytes_of_query(dim);
    if (Span<C>::has_vectors(count)) {
      room.q_units[r] = round_query(q, dim, a.scale, (int16_t*)room.q + (int64_t)r * dim);
    } else {
      int16_t* integers = (int16_t*)room.keys;  // they are not there yet
      room.q_units[r] = round_query(q, dim, a.scale, integers);
      split_query(integers, dim, to);
    }
  }
  static void attend_span(const AttentionArgs& a, const Pages<C>& pages, int span, int count,
                          Tile& tile, const uint16_t* next) {
    const Groups<C> of(a, pages, span, count, tile, next);
    Span<C>(a, of, count, tile).attend();
  }
};

}  // namespace

extern const Kernel attend_float16_pairs = attend_kernel<Rounded<Float16>>();
extern const Kernel attend_bfloat16_pairs = attend_kernel<Rounded<Bfloat16>>();

}  // namespace banyan
