// What tile registers do for attention on rounded numbers: their shapes, products of bytes of queries
// and keys, and of exponentials and values. Included by attention_pairs_amx.cpp. It knows no spans.
#include "attention_pairs_few.inl"

namespace banyan {
namespace {

constexpr int ROWS = 16;          // of a register
constexpr int AT_ONCE = 2 * ROWS;  // rows that the registers take
constexpr int STEP = 64;          // numbers of a head whose bytes one instruction multiplies
constexpr int TILE_BYTES = 1024;  // of a whole register
constexpr int WIDTH = 16;         // sums in a row of a register
constexpr int PLACES = 3;         // registers of sums: of both upper bytes, of one, of none

// How the registers are shaped: 0 ... 5 sums [rows][16] of 32 bits; 6 their factors [rows][64 bytes],
// of queries or exponentials; 7 [16][16][4 bytes], of keys or values. As ldtilecfg reads them.
struct alignas(64) Shape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};
  explicit Shape(int count) {
    for (int i = 0; i < 7; i++) rows[i] = (uint8_t)count;
    rows[7] = ROWS;
  }
};

// The registers while they have a shape; the processor gets them back at the end.
class Registers {
 public:
  ~Registers() {
    if (rows_) _tile_release();
  }
  void take(int rows) {
    if (rows == rows_) return;
    const Shape shape(rows);
    asm volatile("" ::"r"(&shape) : "memory");  // the instruction is not seen to read all of it
    _tile_loadconfig(&shape);
    rows_ = rows;
  }
  // They sleep when nothing was multiplied for a microsecond, and take a quarter of one to wake.
  void keep_awake() const {
    if (rows_) _tile_dpbf16ps(0, 6, 7);
  }

 private:
  int rows_ = 0;
};

// Loads of registers are not seen to read what was stored before.
inline void settle() { asm volatile("" ::: "memory"); }

// --- logits --------------------------------------------------------------------------------------

inline int steps_of(int dim) { return (dim + STEP - 1) / STEP; }
inline int bytes_of_query(int dim) { return 2 * STEP * steps_of(dim); }

// A query's integers become their upper bytes [STEP · steps] and their lower ones, in the order in
// which a key's are: of every four numbers the first, the third, the second, the fourth.
inline void split_query(const int16_t* integers, int dim, uint8_t* to) {
  const int padded = STEP * steps_of(dim);
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  std::memset(to, 0, 2 * padded);
  for (int d = 0; d < dim; d += LANES) {
    __m256i x = _mm256_loadu_si256((const __m256i*)(integers + d));
    __m128i upper = _mm256_cvtepi16_epi8(_mm256_srai_epi16(x, 8)), lower = _mm256_cvtepi16_epi8(x);
    _mm_storeu_si128((__m128i*)(to + d), _mm_shuffle_epi8(upper, order));
    _mm_storeu_si128((__m128i*)(to + padded + d), _mm_shuffle_epi8(lower, order));
  }
}

// A group of keys as [steps][upper bytes, lower bytes][16 fours of numbers][GROUP][4], and its units.
// then: what is read after it.
template <class C>
void split_keys(const uint16_t* k, const uint16_t* then, int64_t stride, int dim, float* units,
                uint8_t* to) {
  const vi even = splat_i(0x00ff00ff), odd = splat_i((int32_t)0xff00ff00);
  alignas(64) float factors[GROUP];
  find_units<C>(k, stride, dim, factors, units);
  const vf factor = load(factors);
  for (int d = 0; d < STEP * steps_of(dim); d += 4) {
    vi first{}, second{};
    if (d < dim) {
      for (int i = 0; i < 4; i += stride > GROUP ? 1 : 2) fetch(then + (d + i) * stride);
      first = make_pair<C>(k + d * stride, stride, factor);
      second = make_pair<C>(k + (d + 2) * stride, stride, factor);
    }
    uint8_t* at = to + d / STEP * 2 * TILE_BYTES + d % STEP / 4 * 64;
    vi upper = (vi)_mm512_srli_epi32((__m512i)first, 8);
    _mm512_store_si512(at, (__m512i)((upper & even) | (second & odd)));
    vi lower = (vi)_mm512_slli_epi32((__m512i)second, 8);
    _mm512_store_si512(at + TILE_BYTES, (__m512i)((first & even) | (lower & odd)));
  }
}

// sums[b][place][row][key] of the rows of the registers with a group of split keys, for B blocks of
// them.
template <int B>
void multiply(const uint8_t* q, int steps, const uint8_t* keys, uint8_t* sums) {
  const int64_t stride = 2 * STEP * steps, lower = STEP * steps, next = ROWS * stride;
  settle();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  if constexpr (B == 2) {
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
  }
  for (int s = 0; s < steps; s++, q += STEP, keys += 2 * TILE_BYTES) {
    _tile_stream_loadd(7, keys, 64);
    _tile_loadd(6, q, stride);
    _tile_dpbssd(0, 6, 7);
    _tile_loadd(6, q + lower, stride);
    _tile_dpbusd(1, 6, 7);
    if constexpr (B == 2) {
      _tile_loadd(6, q + next, stride);
      _tile_dpbssd(3, 6, 7);
      _tile_loadd(6, q + next + lower, stride);
      _tile_dpbusd(4, 6, 7);
    }
    _tile_stream_loadd(7, keys + TILE_BYTES, 64);
    _tile_loadd(6, q, stride);
    _tile_dpbsud(1, 6, 7);
    _tile_loadd(6, q + lower, stride);
    _tile_dpbuud(2, 6, 7);
    if constexpr (B == 2) {
      _tile_loadd(6, q + next, stride);
      _tile_dpbsud(4, 6, 7);
      _tile_loadd(6, q + next + lower, stride);
      _tile_dpbuud(5, 6, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + TILE_BYTES, 64);
  _tile_stored(2, sums + 2 * TILE_BYTES, 64);
  if constexpr (B == 2) {
    _tile_stored(3, sums + 3 * TILE_BYTES, 64);
    _tile_stored(4, sums + 4 * TILE_BYTES, 64);
    _tile_stored(5, sums + 5 * TILE_BYTES, 64);
  }
}

// logits[r] of a group, but for the queries' units.
inline void put_together(const uint8_t* sums, int rows, const float* units, float* logits) {
  const vf unit = load(units);
  for (int r = 0; r < rows; r++) {
    const uint8_t* at = sums + r / ROWS * PLACES * TILE_BYTES + r % ROWS * 64;
    auto place = [&](int n) { return (vi)_mm512_load_si512(at + n * TILE_BYTES); };
    vi sum = (((place(0) << 8) + place(1)) << 8) + place(2);
    store(logits + r * SPAN, to_float(sum) * unit);
  }
}

// --- values --------------------------------------------------------------------------------------

// values[r][n·16 ...] += p[r] · v over chunks, `apart` bytes from one to the next, for B blocks of
// rows and N registers of dimensions. Numbers of registers are part of an instruction.
template <int B, int N>
void weigh(const float* p, const uint8_t* v, int chunks, int64_t apart, bool is_first, int dim,
           float* values) {
  const int64_t stride = sizeof(float) * dim, row = sizeof(float) * SPAN;
  uint8_t* to = (uint8_t*)values;
  const uint8_t* factors = (const uint8_t*)p;
#define EACH_RESULT(what)                              \
  {                                                    \
    what(0, 0, 0);                                     \
    if constexpr (N == 2) what(1, 0, 64);              \
    if constexpr (B == 2) what(2, ROWS, 0);            \
    if constexpr (B == 2 && N == 2) what(3, ROWS, 64); \
  }
#define CLEAR(n, first, column) _tile_zero(n)
#define BRING(n, first, column) _tile_loadd(n, to + (first) * stride + (column), stride)
#define LEAVE(n, first, column) _tile_stored(n, to + (first) * stride + (column), stride)
  settle();
  if (is_first)
    EACH_RESULT(CLEAR)
  else
    EACH_RESULT(BRING)
  for (int c = 0; c < chunks; c++, factors += 2 * CHUNK, v += apart) {
    _tile_loadd(7, v, 64);
    _tile_loadd(6, factors, row);
    _tile_dpbf16ps(0, 6, 7);
    if constexpr (B == 2) {
      _tile_loadd(6, factors + ROWS * row, row);
      _tile_dpbf16ps(2, 6, 7);
    }
    if constexpr (N == 2) {
      _tile_loadd(7, v + TILE_BYTES, 64);
      if constexpr (B == 2) {
        _tile_dpbf16ps(3, 6, 7);
        _tile_loadd(6, factors, row);
      }
      _tile_dpbf16ps(1, 6, 7);
    }
  }
  EACH_RESULT(LEAVE)
#undef EACH_RESULT
#undef CLEAR
#undef BRING
#undef LEAVE
}

// Values of two keys beside each other as [dim / 16][... TILE_BYTES ...][16][2]; zeros for those of
// keys that are not in `seen` and, where it is so wished, for those that are not finite. then: what
// is read after the first.
template <class C>
BN_BF16 inline void pair_values(const uint16_t* row, const uint16_t* then, int key, Range seen,
                                int dim, bool finite_only, uint8_t* to) {
  const __m512i order = order_of_pairs();
  const __m512i kept = _mm512_set1_epi32((int32_t)mask_of_pair(key, seen));
  for (int n = 0; n < dim / WIDTH; n++, row += WIDTH, then += WIDTH) {
    if (n % 2 == 0) {
      fetch(then);
      fetch(then + dim);
    }
    _mm512_store_si512(to + n * TILE_BYTES, value_pair<C>(row, dim, order, kept, finite_only));
  }
}

inline __mmask16 not_finite(vf x) { return _mm512_fpclass_ps_mask((__m512)x, 0x99); }

}  // namespace
}  // namespace banyan
