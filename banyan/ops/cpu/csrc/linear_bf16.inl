// Products of bf16 by vdpbf16ps, two inputs at a time, with fp32 sums. For the files that have VNNI;
// included after linear.inl. What is here runs where has_bf16_products() says so alone.
//
// A (row, output) is one sum, from zero, pairs of inputs in rising order, whatever goes together.
// Weights are used as they lie: nothing is brought to another form first.
#include <utility>

#include "linear_pairs.inl"

namespace banyan {
namespace {

// Rows of `groups` groups: sums, weights and one broadcast fill the registers, and there are more sums
// than the latency of a product needs.
constexpr int pair_rows(int groups) { return groups == 1 ? 12 : 6; }
// All rows go through so many before the next ones: 128 KiB of four groups, for the second-level cache.
constexpr int64_t PANEL_PAIRS = 512;

// Weights of some pairs: of groups `stride` apart; `ahead`: what is fetched meanwhile, or null.
struct Pairs {
  const uint8_t *tiles, *ahead;
  int64_t stride, count;
};

// acc [R][N][GROUP] += products of R rows with N groups.
template <int R, int N>
BN_BF16_TARGET __attribute__((noinline)) void multiply_pairs(const Pairs& pairs, const uint8_t* x,
                                                             int64_t x_bytes, float* acc) {
  __m512 sums[R][N];
  const uint8_t* row[R];
  UNROLL for (int r = 0; r < R; r++) {
    row[r] = x + r * x_bytes;
    UNROLL for (int n = 0; n < N; n++) sums[r][n] = _mm512_loadu_ps(acc + (r * N + n) * GROUP);
  }
  const int64_t ahead = pairs.ahead ? pairs.ahead - pairs.tiles : 0, stride = pairs.stride;
  const uint8_t* tile = pairs.tiles;
  for (int64_t p = 0; p < pairs.count; p++, tile += 64) {
    __m512i w[N];
    UNROLL for (int n = 0; n < N; n++) w[n] = _mm512_loadu_si512(tile + n * stride);
    if (ahead)
      UNROLL for (int n = 0; n < N; n++)
          _mm_prefetch((const char*)tile + n * stride + ahead, _MM_HINT_T0);
    UNROLL for (int r = 0; r < R; r++) {
      const __m512i two = _mm512_set1_epi32(word(row[r] + 4 * p));
      UNROLL for (int n = 0; n < N; n++)
          sums[r][n] = _mm512_dpbf16_ps(sums[r][n], (__m512bh)w[n], (__m512bh)two);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++)
      _mm512_storeu_ps(acc + (r * N + n) * GROUP, sums[r][n]);
}

typedef void (*MultiplyPairs)(const Pairs& pairs, const uint8_t* x, int64_t x_bytes, float* acc);
template <int N, int... R>
constexpr MultiplyPairs multiply_rows(int64_t rows, std::integer_sequence<int, R...>) {
  constexpr MultiplyPairs all[] = {multiply_pairs<R + 1, N>...};
  return all[rows - 1];
}

// N groups of outputs, from `group` on.
template <int N>
void pairs_unit(const LinearArgs& args, int64_t group, int64_t begin, int64_t end,
                uint8_t* scratch) {
  constexpr int64_t MOST = pair_rows(N);
  const int64_t count = end - begin, all = pairs_of(args.k), stride = all * 64;
  const uint8_t* tiles = args.tiles + group * stride;
  const uint8_t* x = args.x + begin * args.x_bytes;
  float* acc = (float*)scratch;
  std::memset(acc, 0, sizeof(float) * GROUP * N * count);
  // Few rows go through all pairs at once, and fetch what lies so far ahead of them.
  const int64_t panels = count <= MOST ? 1 : (all + PANEL_PAIRS - 1) / PANEL_PAIRS;
  for (int64_t p = 0; p < panels; p++) {
    const int64_t from = all * p / panels, to = all * (p + 1) / panels;
    const bool is_last = p == panels - 1;
    Pairs pairs{tiles + from * 64, nullptr, stride, to - from};
    pairs.ahead = panels == 1 ? tiles + PREFETCH : is_last ? tiles + N * stride : tiles + to * 64;
    for (int64_t row = 0, here; row < count; row += here, pairs.ahead = nullptr) {
      const int64_t left = count - row;
      here = even_share(left, MOST);
      float* sums = acc + row * N * GROUP;
      for (int n = 0; n < N && is_last; n++)
        fetch_outputs(args, group + n, begin + row, begin + row + here);
      multiply_rows<N>(here, std::make_integer_sequence<int, MOST>())(
          pairs, x + row * args.x_bytes + from * 4, args.x_bytes, sums);
      for (int64_t r = 0; r < here && is_last; r++)
        for (int n = 0; n < N; n++)
          finish(args, group + n, begin + row + r, sums + (r * N + n) * GROUP);
    }
  }
}

}  // namespace
}  // namespace banyan
