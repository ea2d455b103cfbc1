// Choosing tokens from logits, and log-probabilities, without sorting a vocabulary.
//
// The definition is ops/sampling.py; these kernels give its tokens bit for bit in every instruction
// set. That is so because all that matters is exact: a token's distance below the best one is one
// fp32 subtraction, its weight a fixed row of fp32 roundings, and weights are added up as integers
// (multiples of 2^-44), in any order. So blocks, lanes and bounds are free to be what is fast.
#include <algorithm>
#include <cmath>
#include <limits>

#include "sample.h"
#include "vec.h"
#if defined(__SSE2__) && !defined(__AVX2__) && !defined(__AVX512F__)
#include <emmintrin.h>
#endif

namespace banyan {
namespace {

constexpr int BLOCK = 256;                  // tokens whose largest logit is remembered
constexpr int VECTORS = BLOCK / LANES;      // of a block
constexpr float VANISHED = 58.0f;           // bits below the best where every weight rounds to 0
constexpr int SIDE = 4;                     // vectors of a block that are weighed side by side
constexpr double LN2 = 0.69314718055994531;
constexpr double UNIT = 17592186044416.0;   // 2^44, the weight of the best token
constexpr double SLACK = 1e-3;              // nats by which a bound is wider than what it bounds
constexpr int BINS = 1024;
constexpr float INF = std::numeric_limits<float>::infinity();

// ---- vectors ------------------------------------------------------------------------------------

inline vf bigger(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// Bit i = lane i of a comparison.
inline uint32_t bits_of(vi mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__)
  return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits |= (uint32_t)(mask[i] & 1) << i;
  return bits;
#endif
}

inline vi lanes_of(uint32_t bits) {  // and back
  vi lane;
  for (int i = 0; i < LANES; i++) lane[i] = 1 << i;
  return (splat_i((int32_t)bits) & lane) == lane;
}

// The first n lanes from memory, the others -inf.
inline vf load_row(const float* p, int64_t n) {
  if (n >= LANES) return load(p);
  float lanes[LANES];
  for (int i = 0; i < LANES; i++) lanes[i] = i < n ? p[i] : -INF;
  return load(lanes);
}

// The weights 2^(below * steepness) of tokens, below >= 0 > steepness: 2^n times a polynomial on
// half a bit to either side, without fused products: the same numbers in every instruction set and
// in numpy. Several vectors go step by step side by side, because one alone waits for itself.
template <int N>
inline void weights(vf (&x)[N], vf steepness) {
  constexpr float FACTORS[] = {9.671512728701554e-3f, 5.550733743811287e-2f,
                               2.4022242084016499e-1f, 6.93146977598356e-1f, 1.0f};
  vf lifted[N], p[N];
  for (int i = 0; i < N; i++) x[i] = bigger(x[i] * steepness, splat(-VANISHED));
  for (int i = 0; i < N; i++) lifted[i] = x[i] + splat(12582912.0f);  // 1.5 * 2^23: the nearest
  for (int i = 0; i < N; i++) x[i] -= lifted[i] - splat(12582912.0f);  // integer in the low bits
  for (int i = 0; i < N; i++) p[i] = splat(1.3264727302595286e-3f);
  for (float factor : FACTORS)
    for (int i = 0; i < N; i++) p[i] = p[i] * x[i] + splat(factor);
  for (int i = 0; i < N; i++) x[i] = (vf)((vi)p[i] + ((vi)lifted[i] << 23));
}

inline vf weight(vf below, vf steepness) {
  vf x[1] = {below};
  weights(x, steepness);
  return x[0];
}

// Weights as integers: added to 384 = 1.5 * 2^8, a double keeps multiples of 2^-44 in its low bits.
constexpr double LIFT = 384.0;
constexpr int64_t LIFT_BITS = 0x4078000000000000;

struct Mass {  // a sum of weights, per lane
#if defined(__AVX512F__)
  __m512i a = _mm512_setzero_si512(), b = _mm512_setzero_si512();
#elif defined(__AVX2__)
  __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
#else
  int64_t a[LANES] = {};
#endif
  int64_t vectors = 0;

  inline void add(vf w) {
    vectors++;
#if defined(__AVX512F__)
    __m512d lift = _mm512_set1_pd(LIFT);
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)w));
    __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)w, 1));
    a = _mm512_add_epi64(a, _mm512_castpd_si512(_mm512_add_pd(low, lift)));
    b = _mm512_add_epi64(b, _mm512_castpd_si512(_mm512_add_pd(high, lift)));
#elif defined(__AVX2__)
    __m256d lift = _mm256_set1_pd(LIFT);
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)w));
    __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)w, 1));
    a = _mm256_add_epi64(a, _mm256_castpd_si256(_mm256_add_pd(low, lift)));
    b = _mm256_add_epi64(b, _mm256_castpd_si256(_mm256_add_pd(high, lift)));
#else
    for (int i = 0; i < LANES; i++) {
      double lifted = (double)w[i] + LIFT;
      int64_t bits;
      std::memcpy(&bits, &lifted, 8);
      a[i] += bits - LIFT_BITS;
    }
#endif
  }

  inline void lanes(int64_t* out) const {  // wraps around and back: only the result is small
#if defined(__AVX512F__)
    __m512i lift = _mm512_set1_epi64((int64_t)((uint64_t)LIFT_BITS * (uint64_t)vectors));
    _mm512_storeu_si512(out, _mm512_sub_epi64(a, lift));
    _mm512_storeu_si512(out + 8, _mm512_sub_epi64(b, lift));
#elif defined(__AVX2__)
    __m256i lift = _mm256_set1_epi64x((int64_t)((uint64_t)LIFT_BITS * (uint64_t)vectors));
    _mm256_storeu_si256((__m256i*)out, _mm256_sub_epi64(a, lift));
    _mm256_storeu_si256((__m256i*)(out + 4), _mm256_sub_epi64(b, lift));
#else
    std::memcpy(out, a, sizeof a);
#endif
  }

  inline int64_t total() const {
    int64_t each[LANES], sum = 0;
    lanes(each);
    for (int i = 0; i < LANES; i++) sum += each[i];
    return sum;
  }
};

// ---- one row ------------------------------------------------------------------------------------

// Where a thread keeps what it finds out about a row.
struct Desk {
  float* edited;      // [vocab]
  float* lane_best;   // [blocks, LANES]
  float* block_best;  // [blocks]
  int64_t* block_mass;
  int32_t* ids;      // [vocab] tokens near the best, ascending
  float* below;      // [vocab] their distance from the best
  int64_t* mass;     // [vocab] their weight
  float* below_too;  // [vocab] scratch of nearest()
  int64_t* mass_too;
  int32_t* counts;  // [vocab]
};

Desk desk(Worker& worker, int64_t vocab) {
  int64_t blocks = (vocab + BLOCK - 1) / BLOCK;
  size_t room = 0;
  auto take = [&](size_t bytes) {
    size_t at = room;
    room += (bytes + 63) / 64 * 64;
    return at;
  };
  size_t padded = (size_t)blocks * BLOCK;
  size_t edited = take(padded * 4), lane_best = take((size_t)blocks * LANES * 4);
  size_t block_best = take((size_t)blocks * 4), block_mass = take((size_t)blocks * 8);
  size_t ids = take(padded * 4), below = take(padded * 4), mass = take(padded * 8);
  size_t below_too = take(padded * 4), mass_too = take(padded * 8), counts = take(padded * 4);
  uint8_t* m = worker.scratch(room);
  return Desk{(float*)(m + edited),       (float*)(m + lane_best), (float*)(m + block_best),
              (int64_t*)(m + block_mass), (int32_t*)(m + ids),     (float*)(m + below),
              (int64_t*)(m + mass),       (float*)(m + below_too), (int64_t*)(m + mass_too),
              (int32_t*)(m + counts)};
}

struct Row {
  const float* logits;
  int64_t vocab;
  int64_t blocks;
  float best;
  float steepness = 0.0f;  // bits of weight per unit of distance, negative
  Desk& at;
};

// Largest logit of every lane of every block, of every block, and of all; NaN if any is.
Row survey(const float* logits, int64_t vocab, Desk& at) {
  Row row{logits, vocab, (vocab + BLOCK - 1) / BLOCK, -INF, 0.0f, at};
  vf best = splat(-INF);
  vi odd{};
  for (int64_t b = 0; b < row.blocks; b++) {
    const float* p = logits + b * BLOCK;
    vf most = splat(-INF);
    if ((b + 1) * BLOCK <= vocab) {
      for (int v = 0; v < VECTORS; v++) {
        vf x = load(p + v * LANES);
        odd |= x != x;
        most = bigger(most, x);
      }
    } else {
      for (int64_t i = b * BLOCK; i < vocab; i += LANES) {
        vf x = load_row(logits + i, vocab - i);
        odd |= x != x;
        most = bigger(most, x);
      }
    }
    store(at.lane_best + b * LANES, most);
    at.block_best[b] = largest(most);
    best = bigger(best, most);
  }
  row.best = bits_of(odd) ? std::numeric_limits<float>::quiet_NaN() : largest(best);
  return row;
}

int64_t first_of_best(const Row& row) {
  int64_t b = 0;
  while (row.at.block_best[b] != row.best) b++;
  for (int64_t i = b * BLOCK;; i++)
    if (row.logits[i] == row.best) return i;
}

inline float steepness_of(double temperature) { return (float)(-1.4426950408889634 / temperature); }

// Total weight of all tokens; of every block too.
int64_t weigh(const Row& row) {
  vf best = splat(row.best), steepness = splat(row.steepness);
  int64_t total = 0;
  for (int64_t b = 0; b < row.blocks; b++) {
    const float* p = row.logits + b * BLOCK;
    Mass mass;
    if ((row.best - row.at.block_best[b]) * row.steepness <= -VANISHED) {
    } else if ((b + 1) * BLOCK <= row.vocab) {
      for (int v = 0; v < VECTORS; v += SIDE) {
        vf x[SIDE];
        for (int i = 0; i < SIDE; i++) x[i] = best - load(p + (v + i) * LANES);
        weights(x, steepness);
        for (int i = 0; i < SIDE; i++) mass.add(x[i]);
      }
    } else {
      for (int64_t i = b * BLOCK; i < row.vocab; i += LANES)
        mass.add(weight(best - load_row(row.logits + i, row.vocab - i), steepness));
    }
    row.at.block_mass[b] = mass.total();
    total += row.at.block_mass[b];
  }
  return total;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
struct Packing {  // for every set of lanes, their indices side by side
  uint64_t lanes[256];
  constexpr Packing() : lanes() {
    for (int set = 0; set < 256; set++)
      for (int lane = 0, n = 0; lane < 8; lane++)
        if (set >> lane & 1) lanes[set] |= (uint64_t)lane << 8 * n++;
  }
};
constexpr Packing PACKING;
#endif

// Store the lanes of `set` side by side, as values and as token ids; writes a whole vector of each.
inline int64_t keep_lanes(vf values, int32_t first, uint32_t set, float* out, int32_t* ids) {
#if defined(__AVX512F__)
  __m512i all = _mm512_add_epi32(
      _mm512_set1_epi32(first),
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  _mm512_storeu_ps(out, _mm512_maskz_compress_ps((__mmask16)set, (__m512)values));
  _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32((__mmask16)set, all));
#elif defined(__AVX2__)
  __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)PACKING.lanes[set]));
  _mm256_storeu_ps(out, _mm256_permutevar8x32_ps((__m256)values, lanes));
  _mm256_storeu_si256((__m256i*)ids, _mm256_add_epi32(lanes, _mm256_set1_epi32(first)));
#else
  for (int n = 0, lane = 0; lane < LANES; lane++) {
    out[n] = values[lane];
    ids[n] = first + lane;
    n += set >> lane & 1;
  }
#endif
  return __builtin_popcount(set);
}

// Tokens at most `reach` below the best one: ids and distances, ascending by id. Returns how many.
int64_t gather(const Row& row, float reach) {
  vf best = splat(row.best), far = splat(reach);
  int32_t* ids = row.at.ids;
  float* below = row.at.below;
  int64_t n = 0;
  for (int64_t b = 0; b < row.blocks; b++) {
    if (row.best - row.at.block_best[b] > reach) continue;
    int64_t end = std::min((b + 1) * BLOCK, row.vocab);
    for (int64_t i = b * BLOCK; i < end; i += LANES) {
      vf distance = best - load_row(row.logits + i, end - i);
      uint32_t near = bits_of(distance <= far);
      if (end - i < LANES) near &= (1u << (end - i)) - 1;
      if (!near) continue;
      n += keep_lanes(distance, (int32_t)i, near, below + n, ids + n);
    }
  }
  return n;
}

// The weights of the first n gathered tokens. Returns their sum.
int64_t weigh_gathered(const Row& row, int64_t n) {
  vf steepness = splat(row.steepness);
  int64_t total = 0;
  for (int64_t i = 0; i < n; i += LANES) {
    Mass mass;  // arrays are padded to whole blocks
    mass.add(weight(load(row.at.below + i), steepness));
    mass.lanes(row.at.mass + i);
  }
  for (int64_t i = 0; i < n; i++) total += row.at.mass[i];
  return total;
}

struct Ends {
  float low, high;
};
Ends ends_of(const float* values, int64_t n) {
  vf low = splat(values[0]), high = low;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    low = -bigger(-low, -load(values + i));
    high = bigger(high, load(values + i));
  }
  Ends ends = {-largest(-low), largest(high)};
  for (; i < n; i++) ends = {std::min(ends.low, values[i]), std::max(ends.high, values[i])};
  return ends;
}

// The distance of the last token that is needed when tokens are taken nearest first until their
// masses reach `wanted`; infinity when all together do not. Without `mass` every token counts 1.
//
// Each round deals the tokens that are still in question out to bins of equal width and goes on
// with the bin where the sum crosses. Rounds are few: a bin is 1/1024 of what was there before.
float nearest(const float* below, const int64_t* mass, int64_t n, int64_t wanted, Desk& at) {
  int64_t bins[BINS];
  for (;;) {
    if (!n) return INF;
    auto [low, high] = ends_of(below, n);
    double scale = low == high ? 0.0 : BINS / ((double)high - low);
    for (int64_t i = 0; i < n; i++) {
      int32_t bin = (int32_t)(((double)below[i] - low) * scale);
      at.counts[i] = bin < BINS ? bin : BINS - 1;
    }
    std::memset(bins, 0, sizeof bins);
    for (int64_t i = 0; i < n; i++) bins[at.counts[i]] += mass ? mass[i] : 1;
    int32_t crossing = 0;
    for (; crossing < BINS && bins[crossing] < wanted; crossing++) wanted -= bins[crossing];
    if (crossing == BINS) return INF;
    if (low == high) return low;
    int64_t left = 0;
    for (int64_t i = 0; i < n; i++) {
      if (at.counts[i] != crossing) continue;
      at.below_too[left] = below[i];
      if (mass) at.mass_too[left] = mass[i];
      left++;
    }
    below = at.below_too;
    if (mass) mass = at.mass_too;
    n = left;
  }
}

// A distance within which there are at least n tokens, if there are so many.
float reach_of(const Row& row, int64_t n) {
  // The best of the n-th best lane: each of the n lanes up to it brings a token of its own.
  int64_t lanes = 0;
  for (int64_t i = 0; i < row.blocks * LANES; i++) {
    row.at.below[lanes] = row.best - row.at.lane_best[i];
    lanes += row.at.below[lanes] < INF;
  }
  return nearest(row.at.below, nullptr, lanes, n, row.at);
}

// ---- randomness ---------------------------------------------------------------------------------

inline uint64_t mix(uint64_t z) {  // SplitMix64's output function
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}
inline uint64_t quantile(uint64_t seed, uint64_t position) {
  constexpr uint64_t golden = 0x9e3779b97f4a7c15u;
  return mix((mix(seed + golden) ^ position) + golden);
}
inline int64_t part_of(int64_t total, uint64_t quantile) {  // floor(total * quantile / 2^64)
  return (int64_t)((unsigned __int128)(uint64_t)total * quantile >> 64);
}

// ---- draws --------------------------------------------------------------------------------------

int64_t draw_from_all(const Row& row, uint64_t quantile) {
  int64_t target = part_of(weigh(row), quantile);
  int64_t b = 0;
  for (; target >= row.at.block_mass[b]; b++) target -= row.at.block_mass[b];
  vf best = splat(row.best), steepness = splat(row.steepness);
  for (int64_t i = b * BLOCK;; i += LANES) {
    int64_t lanes[LANES];
    Mass mass;
    mass.add(weight(best - load_row(row.logits + i, row.vocab - i), steepness));
    mass.lanes(lanes);
    for (int lane = 0; lane < LANES; lane++) {
      if (target < lanes[lane]) return i + lane;
      target -= lanes[lane];
    }
  }
}

// Gather and weigh tokens within `reach`: all of them, or so many of the nearest that they weigh
// `wanted`. Most often these are few, however long the tail is that the bound has to allow for.
int64_t gather_mass(const Row& row, float reach, int64_t wanted) {
  for (int64_t few = 64; few <= row.vocab / 64; few *= 8) {
    float near = reach_of(row, few);
    if (near >= reach) break;
    int64_t n = gather(row, near);
    if (weigh_gathered(row, n) >= wanted) return n;
  }
  int64_t n = gather(row, reach);
  weigh_gathered(row, n);
  return n;
}

int64_t draw(const Row& row, const RowParams& params, uint64_t quantile) {
  bool has_k = params.top_k > 0 && params.top_k < row.vocab, has_p = params.top_p < 1.0;
  if (!has_k && !has_p && params.min_p <= 0.0) return draw_from_all(row, quantile);
  // Distances beyond `reach` matter to no filter and to no draw.
  double nats = VANISHED * LN2;
  int64_t wanted = std::numeric_limits<int64_t>::max();
  if (params.min_p > 0.0) nats = std::min(nats, SLACK - std::log(params.min_p));
  if (has_p) {
    double total = (double)weigh(row);
    wanted = std::max((int64_t)1, (int64_t)(params.top_p * total));
    // All tokens lighter than this sum up to less than the rest: the nucleus needs none of them.
    double light = (total - (double)wanted) / ((double)row.vocab * UNIT);
    if (light > 0.0) nats = std::min(nats, SLACK - std::log(light));
  }
  float reach = (float)(nats * params.temperature * (1.0 + 1e-6));
  if (has_k) reach = std::min(reach, reach_of(row, params.top_k));
  const Desk& at = row.at;
  int64_t n = has_p ? gather_mass(row, reach, wanted) : gather(row, reach);
  float last = INF;
  if (has_k) last = nearest(at.below, nullptr, n, params.top_k, row.at);
  if (has_p) last = std::min(last, nearest(at.below, at.mass, n, wanted, row.at));
  else weigh_gathered(row, n);
  int64_t floor = (int64_t)(params.min_p * UNIT), total = 0;
  for (int64_t b = 0; b * BLOCK < n; b++) {
    int64_t kept = 0;
    for (int64_t i = b * BLOCK; i < std::min((b + 1) * BLOCK, n); i++) {
      int64_t keep = -(int64_t)(at.below[i] <= last && at.mass[i] >= floor);
      at.mass[i] &= keep;
      kept += at.mass[i];
    }
    at.block_mass[b] = kept;
    total += kept;
  }
  int64_t target = part_of(total, quantile);
  int64_t b = 0;
  for (; target >= at.block_mass[b]; b++) target -= at.block_mass[b];
  int64_t i = b * BLOCK;
  for (; target >= at.mass[i]; i++) target -= at.mass[i];
  return at.ids[i];
}

// ---- edits --------------------------------------------------------------------------------------

// Lower what was there before: prompt and output are tokens[0 ... length).
void penalise(float* logits, const RowParams& params, const int32_t* tokens, int64_t length,
              int32_t* counts) {
  float frequency = (float)params.frequency, presence = (float)params.presence;
  float repetition = (float)params.repetition;
  if (frequency != 0.0f || presence != 0.0f) {
    for (int64_t i = params.prompt_len; i < length; i++) counts[tokens[i]] = 0;
    for (int64_t i = params.prompt_len; i < length; i++) counts[tokens[i]]++;
    for (int64_t i = params.prompt_len; i < length; i++) {
      int32_t& count = counts[tokens[i]];
      if (count) logits[tokens[i]] -= frequency * (float)count + presence;
      count = 0;
    }
  }
  if (repetition != 1.0f) {
    for (int64_t i = 0; i < length; i++) counts[tokens[i]] = 1;
    for (int64_t i = 0; i < length; i++) {
      float& x = logits[tokens[i]];
      if (counts[tokens[i]]) x = x > 0.0f ? x / repetition : x * repetition;
      counts[tokens[i]] = 0;
    }
  }
}

void copy_allowed(const float* logits, const uint8_t* mask, int64_t vocab, float* out) {
  vf banned = splat(-INF);
  int64_t i = 0;
  for (; i + 16 <= vocab; i += 16) {
    uint32_t bits = mask[i / 8] | (uint32_t)mask[i / 8 + 1] << 8;
    for (int v = 0; v < 16; v += LANES)
      store(out + i + v, choose(lanes_of(bits >> v), load(logits + i + v), banned));
  }
  for (; i < vocab; i++) out[i] = mask[i / 8] >> (i % 8) & 1 ? logits[i] : -INF;
}

// The row's logits with everything that moves single tokens applied, in a copy if any.
const float* edit(const SampleArgs& args, int64_t r, Desk& at) {
  const float* logits = args.logits + r * args.stride;
  const RowParams& params = args.params[args.slots[r]];
  int64_t first = args.addends ? args.addends[r] : 0, end = args.addends ? args.addends[r + 1] : 0;
  bool is_masked = args.mask_of && args.mask_of[r] >= 0;
  if (!params.penalised && !is_masked && first == end) return logits;
  if (is_masked)
    copy_allowed(logits, args.masks + args.mask_of[r] * args.mask_bytes, args.vocab, at.edited);
  else
    std::memcpy(at.edited, logits, sizeof(float) * args.vocab);
  if (params.penalised)
    penalise(at.edited, params, args.history + args.slots[r] * args.history_stride,
             args.positions[r], at.counts);
  for (int64_t i = first; i < end; i++) at.edited[args.addend_ids[i]] += args.addend_values[i];
  return at.edited;
}

// ---- kernels ------------------------------------------------------------------------------------

void sample_rows(const void* packed, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const SampleArgs& args = *(const SampleArgs*)packed;
  Desk at = desk(worker, args.vocab);
  for (int64_t r = begin; r < end; r++) {
    const RowParams& params = args.params[args.slots[r]];
    Row row = survey(edit(args, r, at), args.vocab, at);
    args.best[r] = row.best;
    args.tokens[r] = 0;
    if (std::isfinite(row.best)) {
      row.steepness = steepness_of(params.temperature);
      args.tokens[r] = params.greedy ? first_of_best(row)
                                     : draw(row, params, quantile(params.seed, args.positions[r]));
    }
    args.history[args.slots[r] * args.history_stride + args.positions[r]] = (int32_t)args.tokens[r];
  }
}

void report_top(const Row& row, int64_t top, double temperature, double log_total, int32_t* ids,
                float* logprobs) {
  int64_t n = gather(row, reach_of(row, top));
  Desk& at = row.at;
  int32_t* order = at.counts;  // indices into what was gathered: ascending ids among equals
  for (int64_t i = 0; i < n; i++) order[i] = (int32_t)i;
  std::partial_sort(order, order + top, order + n, [&](int32_t a, int32_t b) {
    return at.below[a] < at.below[b] || (at.below[a] == at.below[b] && a < b);
  });
  for (int64_t i = 0; i < top; i++) {
    ids[i] = at.ids[order[i]];
    logprobs[i] = (float)(((double)row.logits[ids[i]] - row.best) / temperature - log_total);
  }
}

void logprob_rows(const void* packed, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const LogprobArgs& args = *(const LogprobArgs*)packed;
  Desk at = desk(worker, args.vocab);
  for (int64_t r = begin; r < end; r++) {
    Row row = survey(args.logits + args.rows[r] * args.stride, args.vocab, at);
    double temperature = args.temperatures[r], log_total = std::numeric_limits<double>::quiet_NaN();
    row.steepness = steepness_of(temperature);
    bool is_good = std::isfinite(row.best);
    if (is_good) log_total = std::log((double)weigh(row) / UNIT);
    auto value = [&](int64_t token) {
      return (float)(((double)row.logits[token] - row.best) / temperature - log_total);
    };
    args.logprobs[r] = value(args.tokens[r]);
    for (int64_t i = r * args.num_picked; i < (r + 1) * args.num_picked; i++)
      args.picked_logprobs[i] = value(args.picked[i]);
    int32_t* ids = args.top_ids + r * args.top;
    float* logprobs = args.top_logprobs + r * args.top;
    if (is_good && args.top) {
      report_top(row, args.top, temperature, log_total, ids, logprobs);
    } else {
      std::fill(ids, ids + args.top, 0);
      std::fill(logprobs, logprobs + args.top, std::numeric_limits<float>::quiet_NaN());
    }
  }
}

template <typename Args>
int64_t rows_of(const void* args, const Sizes& sizes) {
  return sizes.n[((const Args*)args)->size];
}
int64_t one_row(const void*, const Sizes&) { return 1; }
template <typename Args>
void cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  double logits = (double)rows_of<Args>(args, sizes) * (double)((const Args*)args)->vocab;
  *bytes = 4 * logits;
  *operations = 24 * logits;  // the exponential
}

constexpr SampleKernels KERNELS = {
    {"sample", rows_of<SampleArgs>, one_row, sample_rows, cost<SampleArgs>},
    {"logprobs", rows_of<LogprobArgs>, one_row, logprob_rows, cost<LogprobArgs>},
};

}  // namespace

extern const SampleKernels BN_TABLE = KERNELS;

}  // namespace banyan
