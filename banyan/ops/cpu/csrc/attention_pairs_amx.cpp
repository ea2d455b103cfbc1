// Attention on rounded numbers with tile registers, for pages of 16-bit floats.
//
// q·k: a query is split into two bf16, which hold 16 bits of its numbers, and so is a key of fp16,
// which they hold whole; a key of bf16 is one. Products of the three pairs that matter are added in
// fp32, dimensions ascending. p·v: exponentials and values are rounded to bf16 and added in fp32, in
// chunks of CHUNK keys at absolute positions, ascending; the sum that divides them is that of the
// rounded exponentials. Within a chunk a key that a query does not see counts as zero times its
// value, and one that no query of the tile sees has zeros for its values: what lies there may be
// anything. Values that are not finite are found by what they make of the results, and then treated
// apart.
//
// A row of a tile register adds the same numbers in the same order whatever the other rows are, so
// one code serves one query and many.
#include "attention_pairs.inl"

namespace banyan {
namespace {

constexpr int ROWS = 16;          // of a register
constexpr int AT_ONCE = 2 * ROWS;  // rows that the registers take
constexpr int STEP = 32;          // numbers of a head that one instruction multiplies
constexpr int TILE_BYTES = 1024;  // of a whole register
constexpr int WIDTH = 16;         // sums in a row of a register

// How the registers are shaped: 0, 1 sums [rows][16] fp32 of the first ROWS rows, 2, 3 of those
// behind them; 4, 5 their factors [rows][32] bf16, of queries or exponentials; 6, 7 [16 pairs][16][2]
// bf16, of keys or values. As ldtilecfg reads them.
struct alignas(64) Shape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  explicit Shape(int count) {
    int first = count < ROWS ? count : ROWS, second = count - first;
    const int of[8] = {first, first, second, second, first, second, ROWS, ROWS};
    for (int i = 0; i < 8; i++) rows[i] = (uint8_t)of[i], bytes[i] = of[i] ? 64 : 0;
  }
};

// The registers while they have a shape; the processor gets them back at the end.
class Registers {
 public:
  ~Registers() { _tile_release(); }
  void take(int rows) {
    if (rows == rows_) return;
    const Shape shape(rows);
    _tile_loadconfig(&shape);
    rows_ = rows;
  }
  // They sleep when nothing was multiplied for a microsecond, and take a quarter of one to wake.
  void keep_awake() const { _tile_dpbf16ps(0, 4, 6); }

 private:
  int rows_ = 0;
};

// Loads of registers are not seen to read what was stored before.
inline void settle() { asm volatile("" ::: "memory"); }

template <class C>
constexpr int PARTS = 2;  // bf16 that make a number of the cache
template <>
constexpr int PARTS<Bfloat16> = 1;

inline int steps_of(int dim) { return (dim + STEP - 1) / STEP; }

// --- logits --------------------------------------------------------------------------------------

// A query's numbers times `factor`, as what bf16 holds of them [STEP · steps] and the rest of that.
BN_BF16 void split_query(const float* q, int dim, float factor, uint16_t* to) {
  const int padded = STEP * steps_of(dim);
  std::memset(to, 0, sizeof *to * 2 * padded);
  for (int d = 0; d < dim; d += LANES) {
    vf x = load(q + d) * splat(factor);
    __m256bh most = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to + d, &most, sizeof most);
    __m256bh rest = _mm512_cvtneps_pbh((__m512)(x - load_bf16(to + d)));
    std::memcpy(to + padded + d, &rest, sizeof rest);
  }
}

// A group of keys as [steps][PARTS][16 pairs of numbers][GROUP][2]. then: what is read after it.
template <class C>
void split_keys(const uint16_t* k, const uint16_t* then, int64_t stride, int dim, uint8_t* to) {
  const vi upper = splat_i((int32_t)0xffff0000);
  auto put = [](uint8_t* at, vi even, vi odd) {
    even = (vi)_mm512_srli_epi32((__m512i)even, 16);
    _mm512_store_si512(at, _mm512_mask_blend_epi16(0xaaaaaaaau, (__m512i)even, (__m512i)odd));
  };
  for (int s = 0; s < steps_of(dim); s++, to += PARTS<C> * TILE_BYTES)
    for (int d = s * STEP, at = 0; at < TILE_BYTES; d += 2, at += 64) {
      if (d >= dim) {
        for (int part = 0; part < PARTS<C>; part++)
          _mm512_store_si512(to + part * TILE_BYTES + at, _mm512_setzero_si512());
        continue;
      }
      fetch(then + d * stride);
      if (stride > GROUP) fetch(then + (d + 1) * stride);
      vi even = (vi)C::get(k + d * stride), odd = (vi)C::get(k + (d + 1) * stride);
      put(to + at, even, odd);
      if (PARTS<C> == 2)
        put(to + TILE_BYTES + at, (vi)((vf)even - (vf)(even & upper)),
            (vi)((vf)odd - (vf)(odd & upper)));
    }
}

// What B blocks of rows and N registers of keys or values make, at `to` in rows of `stride` bytes.
// Numbers of registers are part of an instruction.
#define EACH_RESULT(what)                    \
  {                                          \
    what(0, 0, 0);                           \
    if constexpr (N == 2) what(1, 0, 64);    \
    if constexpr (B == 2) what(2, ROWS, 0);  \
    if constexpr (B == 2 && N == 2) what(3, ROWS, 64); \
  }
#define CLEAR(n, row, column) _tile_zero(n)
#define BRING(n, row, column) _tile_loadd(n, to + (row) * stride + (column), stride)
#define LEAVE(n, row, column) _tile_stored(n, to + (row) * stride + (column), stride)
// Adds the products of what lies at `factors` with registers 6 and 7.
#define MULTIPLY(factors, apart)                                \
  {                                                             \
    const uint8_t* at = (const uint8_t*)(factors);              \
    _tile_loadd(4, at, apart);                                  \
    _tile_dpbf16ps(0, 4, 6);                                    \
    if constexpr (N == 2) _tile_dpbf16ps(1, 4, 7);              \
    if constexpr (B == 2) {                                     \
      _tile_loadd(5, at + ROWS * (apart), apart);               \
      _tile_dpbf16ps(2, 5, 6);                                  \
      if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);            \
    }                                                           \
  }

// logits[r][n·16 ...] = q[r] · k for the rows of the registers and N groups of split keys.
template <class C, int B, int N>
void score(const uint16_t* q, int steps, const uint8_t* keys, float* logits) {
  const int64_t row = sizeof *q * 2 * STEP * steps, group = (int64_t)steps * PARTS<C> * TILE_BYTES;
  const int64_t stride = sizeof(float) * SPAN;
  uint8_t* to = (uint8_t*)logits;
  settle();
  EACH_RESULT(CLEAR);
  for (int s = 0; s < steps; s++, q += STEP, keys += PARTS<C> * TILE_BYTES) {
    _tile_stream_loadd(6, keys, 64);
    if constexpr (N == 2) _tile_stream_loadd(7, keys + group, 64);
    MULTIPLY(q, row);
    MULTIPLY(q + STEP * steps, row);
    if constexpr (PARTS<C> == 2) {
      _tile_stream_loadd(6, keys + TILE_BYTES, 64);
      if constexpr (N == 2) _tile_stream_loadd(7, keys + group + TILE_BYTES, 64);
      MULTIPLY(q, row);
    }
  }
  EACH_RESULT(LEAVE);
}

// --- values --------------------------------------------------------------------------------------

// values[r][n·16 ...] += p[r] · v over chunks, `apart` bytes from one to the next, for the rows of
// the registers; N vectors of the head.
template <int B, int N>
void weigh(const float* p, const uint8_t* v, int chunks, int64_t apart, bool is_first, int dim,
           float* values) {
  const int64_t stride = sizeof(float) * dim, row = sizeof(float) * SPAN;
  uint8_t* to = (uint8_t*)values;
  const uint16_t* factors = (const uint16_t*)p;
  settle();
  if (is_first)
    EACH_RESULT(CLEAR)
  else
    EACH_RESULT(BRING)
  for (int c = 0; c < chunks; c++, factors += CHUNK, v += apart) {
    _tile_loadd(6, v, 64);
    if constexpr (N == 2) _tile_loadd(7, v + TILE_BYTES, 64);
    MULTIPLY(factors, row);
  }
  EACH_RESULT(LEAVE);
}

// Values of two keys, the numbers of both beside each other, as [dim / 16][... TILE_BYTES ...][16][2].
// mask: of bits that are kept; then: what is read after the first.
template <class C>
BN_BF16 inline void pair_values(const uint16_t* row, const uint16_t* then, int dim, uint32_t mask,
                                bool finite_only, uint8_t* to) {
  const __m512i order = order_of_pairs(), kept = _mm512_set1_epi32((int32_t)mask);
  for (int n = 0; n < dim / WIDTH; n++, row += WIDTH, then += WIDTH) {
    if (n % 2 == 0) {
      fetch(then);
      fetch(then + dim);
    }
    __m512i pair = _mm512_and_si512((__m512i)make_value_pair<C>(row, dim, order), kept);
    if (finite_only) {
      const __m512i magnitude = _mm512_and_si512(pair, _mm512_set1_epi16(0x7fff));
      pair = _mm512_maskz_mov_epi16(
          _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(0x7f80)), pair);
    }
    _mm512_store_si512(to + n * TILE_BYTES, pair);
  }
}

inline __mmask16 not_finite(vf x) { return _mm512_fpclass_ps_mask((__m512)x, 0x99); }

// --- a span --------------------------------------------------------------------------------------

// One span of a tile at work. Up to AT_ONCE queries, which memory holds up, use a group of keys and a
// chunk of values while the next one is made; for more of them the whole span is made first.
template <class C>
class Span {
 public:
  static int query_numbers(int dim) { return 2 * STEP * steps_of(dim); }
  static size_t bytes(int count, int dim) {
    return sizeof(uint16_t) * count * query_numbers(dim) + groups_kept(count) * group_bytes(dim) +
           chunks_kept(count) * chunk_bytes(dim);
  }
  static uint16_t* query(const Tile& tile, int dim, int r) {
    return (uint16_t*)tile.room + (int64_t)r * query_numbers(dim);
  }

  Span(const AttentionArgs& a, const Groups<C>& groups, int count, const Tile& tile)
      : a_(a), of_(groups), tile_(tile), dim_(a.head_dim), count_(count) {
    keys_ = (uint8_t*)query(tile, dim_, count);
    values_ = keys_ + groups_kept(count) * group_bytes(dim_);
    seen_ = all_of(tile.seen, count);
  }

  void attend() {
    if (count_ <= AT_ONCE) {
      for (int g = of_.begin; g <= of_.end; g++) {
        if (g < of_.end) fill_keys(g);
        if (g > of_.begin) score_rows(0, {g - 1, g});
      }
      soften_rows(0);
      weigh_finite(0);
    } else {
      for (int g = of_.begin; g < of_.end; g++) fill_keys(g);
      fill_span();
      for (int r = 0; r < count_; r += AT_ONCE) {
        score_rows(r, groups_of(all_of(tile_.seen + r, rows_from(r))));
        soften_rows(r);
        weigh_finite(r);
      }
    }
  }

 private:
  static int groups_kept(int count) { return count > AT_ONCE ? GROUPS : 2; }
  static int chunks_kept(int count) { return count > AT_ONCE ? SPAN / CHUNK : 2; }
  static int64_t group_bytes(int dim) { return (int64_t)steps_of(dim) * PARTS<C> * TILE_BYTES; }
  static int64_t chunk_bytes(int dim) { return (int64_t)dim / WIDTH * TILE_BYTES; }
  uint8_t* keys(int group) const {
    return keys_ + group % groups_kept(count_) * group_bytes(dim_);
  }
  uint8_t* values(int chunk) const {
    return values_ + chunk % chunks_kept(count_) * chunk_bytes(dim_);
  }
  float* logits(int r) const { return tile_.logits + (int64_t)(r % AT_ONCE) * SPAN; }
  int rows_from(int r) const { return count_ - r < AT_ONCE ? count_ - r : AT_ONCE; }

  static Range groups_of(Range keys) { return {keys.lo / GROUP, (keys.hi + GROUP - 1) / GROUP}; }

  void fill_span() {
    const Range chunks = chunks_of(seen_);
    for (int c = chunks.lo; c < chunks.hi; c++) fill_values(c);
  }

  // Values that are not finite make results that are not: only then they are treated apart.
  void weigh_finite(int r) {
    weigh_all(r);
    if (!finite_only_ && has_not_finite(r)) {
      finite_only_ = true;
      if (count_ > AT_ONCE) fill_span();
      weigh_all(r);
    }
    if (finite_only_) add_not_finite(r);
  }
  void weigh_all(int r) {
    if (count_ > AT_ONCE) return weigh_rows(r, chunks_of(all_of(tile_.seen + r, rows_from(r))), true);
    const Range chunks = chunks_of(seen_);
    for (int c = chunks.lo; c <= chunks.hi; c++) {
      if (c < chunks.hi) fill_values(c);
      if (c > chunks.lo) weigh_rows(r, {c - 1, c}, c - 1 == chunks.lo);
    }
  }

  void fill_keys(int group) {
    split_keys<C>(of_.k[group], of_.k[group + AHEAD], of_.stride(group), dim_, keys(group));
  }
  void fill_values(int chunk) {
    uint8_t* to = values(chunk);
    const int begin = chunk * CHUNK;
    for (int i = begin; i < begin + CHUNK; i += 2, to += 64) {
      uint32_t mask = (i >= seen_.lo && i < seen_.hi ? 0xffff : 0) |
                      (i + 1 >= seen_.lo && i + 1 < seen_.hi ? 0xffff0000 : 0);
      if (!mask) {
        for (int n = 0; n < dim_ / WIDTH; n++)
          _mm512_store_si512(to + n * TILE_BYTES, _mm512_setzero_si512());
        continue;
      }
      int g = i / GROUP;
      const uint16_t* row = of_.v[g] + i % GROUP * dim_;
      pair_values<C>(row, row + (of_.v[g + AHEAD] - of_.v[g]), dim_, mask, finite_only_, to);
    }
  }

  void score_rows(int r, Range groups) {
    using Score = void (*)(const uint16_t*, int, const uint8_t*, float*);
    constexpr Score SCORE[2][2] = {{score<C, 1, 1>, score<C, 1, 2>},
                                   {score<C, 2, 1>, score<C, 2, 2>}};
    registers_.take(rows_from(r));
    for (int g = groups.lo; g < groups.hi; g += 2)
      SCORE[rows_from(r) > ROWS][g + 1 < groups.hi](query(tile_, dim_, r), steps_of(dim_), keys(g),
                                                    logits(r) + g * GROUP);
  }
  void soften_rows(int first) {
    constexpr float UNITS[SOFTENED] = {1.0f, 1.0f, 1.0f, 1.0f};
    const int end = first + rows_from(first);
    const Range chunks = chunks_of(all_of(tile_.seen + first, rows_from(first)));
    for (int r = first; r < end; r += SOFTENED) {
      registers_.keep_awake();
      soften_some(logits(r), end - r < SOFTENED ? end - r : SOFTENED, tile_.seen + r, chunks, UNITS,
                  a_.soft_cap, tile_.shares + r);
    }
    for (int r = first; r < end && chunks.lo < chunks.hi; r++)
      if (tile_.seen[r].lo >= tile_.seen[r].hi)
        std::memset((uint16_t*)logits(r) + chunks.lo * CHUNK, 0,
                    sizeof(uint16_t) * CHUNK * (chunks.hi - chunks.lo));
  }
  void weigh_rows(int r, Range chunks, bool is_first) {
    using Weigh = void (*)(const float*, const uint8_t*, int, int64_t, bool, int, float*);
    constexpr Weigh WEIGH[2][2] = {{weigh<1, 1>, weigh<1, 2>}, {weigh<2, 1>, weigh<2, 2>}};
    registers_.take(rows_from(r));
    for (int d = 0; d < dim_; d += 2 * WIDTH)
      WEIGH[rows_from(r) > ROWS][d + WIDTH < dim_](
          logits(r) + chunks.lo * CHUNK / 2, values(chunks.lo) + d / WIDTH * TILE_BYTES,
          chunks.hi - chunks.lo, chunk_bytes(dim_), is_first, dim_,
          tile_.values + (int64_t)r * dim_ + d);
  }

  bool has_not_finite(int r) const {
    const float* values = tile_.values + (int64_t)r * dim_;
    __mmask16 odd = 0;
    for (int i = 0; i < rows_from(r) * dim_; i += LANES) odd |= not_finite(load(values + i));
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
          float* to = tile_.values + (int64_t)r * dim_ + d;
          _mm512_mask_storeu_ps(to, odd, (__m512)(load(to) + p * v));
        }
      }
  }

  const AttentionArgs& a_;
  const Groups<C>& of_;
  const Tile& tile_;
  int dim_, count_;
  uint8_t *keys_, *values_;
  Range seen_;  // by any query
  bool finite_only_ = false;
  Registers registers_;
};

template <class Cached>
struct Rounded {
  using C = Cached;
  static size_t bytes(int count, int dim) { return Span<C>::bytes(count, dim); }
  static int rows_of_logits(int count) { return count < AT_ONCE ? count : AT_ONCE; }
  static void take(const AttentionArgs& a, Tile& tile, int, int r, const float* q) {
    split_query(q, a.head_dim, a.scale, Span<C>::query(tile, a.head_dim, r));
  }
  static void attend_span(const AttentionArgs& a, const Pages<C>& pages, int span, int count,
                          Tile& tile, const uint16_t* next) {
    Groups<C> of(a, pages, span, count, tile, next);
    Span<C>(a, of, count, tile).attend();
  }
};

}  // namespace

extern const Kernel attend_float16_pairs = attend_kernel<Rounded<Float16>>();
extern const Kernel attend_bfloat16_pairs = attend_kernel<Rounded<Bfloat16>>();

}  // namespace banyan
