// The indexer of sparse latent attention for one instruction set. Included by attention.inl.
//
// Vectors run over the heads: a number of a key meets the same number of all heads, ascending; a
// position's score is the sum over the heads of weight * relu. What a position scores depends on its
// key and the token alone. Of equal scores the lower positions are chosen.
#include <algorithm>
#include <functional>

namespace banyan {
namespace {

constexpr int KEYS_AT_ONCE = 4;

// Working memory of a token that chooses among `length` positions.
struct IndexTile {
  int heads, width;      // up to whole vectors
  float *q, *weights;    // [width][heads], [heads]
  float *keys;           // [KEYS_AT_ONCE][width up to whole vectors, twice]
  float *scores, *some;  // [length]

  IndexTile(Worker& worker, const ChooseArgs& a, int64_t length)
      : heads(up_to_vectors(a.heads)), width(a.plain + a.turned) {
    size_t row = up_to_vectors(a.plain) + up_to_vectors(a.turned);
    size_t floats = (size_t)heads * (width + 1) + KEYS_AT_ONCE * row + 2 * length;
    q = (float*)worker.scratch(sizeof(float) * floats);
    weights = q + (size_t)heads * width;
    keys = weights + heads;
    scores = keys + KEYS_AT_ONCE * row;
    some = scores + length;
    std::memset(q, 0, sizeof(float) * heads * (width + 1));
  }
};

template <class C>
const typename C::type* index_row(const ChooseArgs& a, const void* pages, int n,
                                  const int32_t* table, int64_t position) {
  int64_t page = table[position / a.page_size], offset = position % a.page_size;
  return (const typename C::type*)pages + (page * a.page_size + offset) * (n + C::BESIDE);
}

template <class C>
void score_positions(const ChooseArgs& a, const int32_t* table, const int32_t* path,
                     int64_t length, IndexTile& tile) {
  int plain = up_to_vectors(a.plain), row = plain + up_to_vectors(a.turned);
  for (int64_t first = a.first; first < length; first += KEYS_AT_ONCE) {
    int count = length - first < KEYS_AT_ONCE ? (int)(length - first) : KEYS_AT_ONCE;
    for (int k = 0; k < count; k++) {
      float* key = tile.keys + k * row;
      int64_t at = place_of(path, first + k);
      widen_row<C>(index_row<C>(a, a.key_pages, a.plain, table, at), a.plain, key);
      widen_row<C>(index_row<C>(a, a.turned_pages, a.turned, table, at), a.turned, key + plain);
    }
    vf totals[KEYS_AT_ONCE] = {};
    for (int h = 0; h < tile.heads; h += LANES) {
      vf sums[KEYS_AT_ONCE] = {};
      const float* q = tile.q + h;
      auto add = [&](int from, int n) {
        for (int d = 0; d < n; d++, q += tile.heads) {
          vf number = load(q);
          UNROLL for (int k = 0; k < KEYS_AT_ONCE; k++)
              sums[k] = fma(splat(tile.keys[k * row + from + d]), number, sums[k]);
        }
      };
      add(0, a.plain);
      add(plain, a.turned);
      vf weight = load(tile.weights + h);
      UNROLL for (int k = 0; k < KEYS_AT_ONCE; k++)
          totals[k] = fma(max(vf{}, sums[k]), weight, totals[k]);
    }
    for (int k = 0; k < count; k++) {
      float score = sum(totals[k]);
      tile.scores[first + k] = score == score ? score : INFINITY;
    }
  }
}

void choose_best(const ChooseArgs& a, int64_t length, IndexTile& tile, int32_t* chosen) {
  int64_t seen = length - a.first;
  std::memcpy(tile.some, tile.scores + a.first, sizeof(float) * seen);
  std::nth_element(tile.some, tile.some + a.top - 1, tile.some + seen, std::greater<float>());
  float least = tile.some[a.top - 1];
  int64_t left = a.top;
  for (int64_t i = a.first; i < length; i++) left -= tile.scores[i] > least;
  for (int64_t i = a.first; i < length; i++) {
    bool is_best = tile.scores[i] > least || (tile.scores[i] == least && left-- > 0);
    chosen[i / 32] |= (int32_t)((uint32_t)is_best << i % 32);
  }
}

template <class C>
void choose_run(const void* args, const Sizes& sizes, int64_t begin, int64_t end, Worker& worker) {
  const ChooseArgs& a = *(const ChooseArgs*)args;
  int64_t row = 0;
  for (int64_t token = begin; token < end; token++) {
    while (row + 1 < sizes.n[ROWS] && a.row_starts[row + 1] <= token) row++;
    const int32_t* path = a.paths.of(token);
    int64_t length = path ? position_of(path) + 1
                          : a.context_lengths[row] + token - a.row_starts[row] + 1;
    int32_t* chosen = a.chosen + token * a.words;
    std::memset(chosen, 0, sizeof(int32_t) * ((length + 31) / 32));
    if (length - a.first <= a.top) {
      for (int64_t i = a.first; i < length; i++) chosen[i / 32] |= (int32_t)(1u << i % 32);
      continue;
    }
    IndexTile tile(worker, a, length);
    const float* q = a.q + token * a.q_stride;
    const float* turned = a.q_turned + token * a.turned_stride;
    for (int h = 0; h < a.heads; h++) {
      for (int d = 0; d < a.plain; d++) tile.q[d * tile.heads + h] = q[h * a.plain + d];
      for (int d = 0; d < a.turned; d++)
        tile.q[(a.plain + d) * tile.heads + h] = turned[h * a.turned + d];
      tile.weights[h] = a.weights[token * a.weights_stride + h];
    }
    score_positions<C>(a, a.page_tables + row * a.table_stride, path, length, tile);
    choose_best(a, length, tile, chosen);
  }
}
int64_t choose_units(const void* args, const Sizes& sizes) {
  return sizes.n[((const ChooseArgs*)args)->size];
}
template <class C>
void choose_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const ChooseArgs& a = *(const ChooseArgs*)args;
  double pairs = 0, keys = 0;
  for (int64_t row = 0; row < sizes.n[ROWS]; row++) {
    double count = a.row_starts[row + 1] - a.row_starts[row];
    double length = a.context_lengths[row] + count;
    if (length - a.first <= a.top) continue;
    keys += length * count;
    pairs += length * count;
  }
  *bytes = keys * (a.plain + a.turned + 2 * C::BESIDE) * sizeof(typename C::type);
  *operations = pairs * a.heads * (a.plain + a.turned + 2) * 2.0;
}

template <class C>
constexpr Kernel choose_kernel() {
  return {"choose_positions", choose_units, attend_grain, choose_run<C>, choose_cost<C>};
}

}  // namespace
}  // namespace banyan
