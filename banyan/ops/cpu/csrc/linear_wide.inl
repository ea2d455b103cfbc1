// Products of several groups of outputs at a time with many rows of fp32, as linear_several.inl has
// them of integers. For the files that have AVX-512; included after linear.inl, whose exact_unit gives
// the same bits for one group: acc = fma(x, w, acc), inputs in rising order.
namespace banyan {
namespace {

constexpr int WIDE_GROUPS = 4;
constexpr int64_t WIDE_MOST = 6;  // rows: their sums, the weights and one broadcast fill the registers
static_assert(sizeof(float) * GROUP * WIDE_GROUPS * (PANEL_ROWS + EXACT_CHUNK) + sizeof(Panel) <=
              LINEAR_SCRATCH);

// Of so many rows that are left those that go next: none are left by themselves.
inline int64_t even_share(int64_t left, int64_t most) {
  return left <= most ? left : left < 2 * most ? (left + 1) / 2 : most;
}

// acc [R][WIDE_GROUPS][GROUP] += products of R rows with `count` inputs of groups `stride` apart.
template <int R>
__attribute__((noinline)) void multiply_wide(const float* w, int64_t stride, int64_t count,
                                             const WideRows& rows, int64_t row, float* acc) {
  __m512 sums[R][WIDE_GROUPS];
  const float* x[R];
  UNROLL for (int r = 0; r < R; r++) {
    x[r] = (const float*)(rows.x + (row + r) * rows.bytes) + rows.first;
    UNROLL for (int n = 0; n < WIDE_GROUPS; n++)
        sums[r][n] = _mm512_loadu_ps(acc + (r * WIDE_GROUPS + n) * GROUP);
  }
  for (int64_t k = 0; k < count; k++, w += GROUP) {
    __m512 v[WIDE_GROUPS];
    UNROLL for (int n = 0; n < WIDE_GROUPS; n++) v[n] = _mm512_loadu_ps(w + n * stride);
    UNROLL for (int r = 0; r < R; r++) {
      const __m512 one = _mm512_set1_ps(x[r][k]);
      UNROLL for (int n = 0; n < WIDE_GROUPS; n++)
          sums[r][n] = _mm512_fmadd_ps(one, v[n], sums[r][n]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < WIDE_GROUPS; n++)
      _mm512_storeu_ps(acc + (r * WIDE_GROUPS + n) * GROUP, sums[r][n]);
}

template <FormatId F>
void wide_unit(const LinearArgs& args, int64_t group, int64_t begin, int64_t end,
               uint8_t* scratch) {
  constexpr decltype(&multiply_wide<1>) MULTIPLY[] = {multiply_wide<1>, multiply_wide<2>,
                                                      multiply_wide<3>, multiply_wide<4>,
                                                      multiply_wide<5>, multiply_wide<6>};
  const int64_t count = end - begin, bytes = group_bytes(F, args.k);
  const uint8_t* tiles = args.tiles + group * bytes;
  float* acc = (float*)scratch;
  float* wide = acc + GROUP * WIDE_GROUPS * PANEL_ROWS;
  Panel& panel = *(Panel*)(wide + GROUP * WIDE_GROUPS * EXACT_CHUNK);
  std::memset(acc, 0, sizeof(float) * GROUP * WIDE_GROUPS * count);
  WideRows rows{args.x + begin * args.x_bytes, args.x_bytes, 0};
  for (int64_t here; rows.first < args.k; rows.first += here) {
    here = args.k - rows.first < EXACT_CHUNK ? args.k - rows.first : EXACT_CHUNK;
    const float* w = wide;
    int64_t stride = EXACT_CHUNK * GROUP;
    if constexpr (F == F32) {
      w = (const float*)tiles + rows.first * GROUP;
      stride = bytes / 4;
    } else {
      for (int n = 0; n < WIDE_GROUPS; n++)
        widen_chunk<F>(tiles + n * bytes, rows.first, here, panel, wide + n * stride);
    }
    for (int64_t row = 0, some; row < count; row += some) {
      some = even_share(count - row, WIDE_MOST);
      MULTIPLY[some - 1](w, stride, here, rows, row, acc + row * GROUP * WIDE_GROUPS);
    }
  }
  for (int64_t r = 0; r < count; r++)
    for (int n = 0; n < WIDE_GROUPS; n++)
      finish(args, group + n, begin + r, acc + (r * WIDE_GROUPS + n) * GROUP);
}

}  // namespace
}  // namespace banyan
