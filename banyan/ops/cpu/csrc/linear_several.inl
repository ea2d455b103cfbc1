// Products of several groups of outputs at a time with many rows: one broadcast of activations serves
// all of them, and there are more sums than the latency of a product needs. For the files that have
// vpdpbusd; included after linear.inl, whose `multiply` gives the same bits for one group.
namespace banyan {
namespace {

constexpr int SEVERAL = 4;         // groups
constexpr int SEVERAL_ROWS = 6;    // their sums, the weights and one broadcast fill the registers
constexpr int64_t SEVERAL_STEP = 48;  // rows that are finished at a time

// Weights of some blocks, a byte each; small enough for the first-level cache beside the rows.
struct alignas(64) SeveralPanel {
  static constexpr int BLOCKS = 6;
  uint8_t q[BLOCKS][8][SEVERAL][64];
  float scales[BLOCKS][2][SEVERAL][GROUP], lifts[BLOCKS][2][SEVERAL][GROUP];
  float minima[BLOCKS][2][SEVERAL][GROUP];
};
static_assert(sizeof(float) * GROUP * SEVERAL * PANEL_ROWS + sizeof(SeveralPanel) <= LINEAR_SCRATCH);

template <FormatId F>
void unpack_several(const uint8_t* tiles, int64_t stride, int64_t blocks, SeveralPanel& panel) {
  constexpr Format f = FORMATS[F];
  constexpr int PARTS = f.parts();
  for (int n = 0; n < SEVERAL; n++, tiles += stride)
    for (int64_t b = 0; b < blocks; b++) {
      const Tile<F> tile = Tile<F>{tiles}.at(b);
      UNROLL for (int g = 0; g < 8; g++) _mm512_store_si512(panel.q[b][g][n], tile.weights(g));
      UNROLL for (int p = 0; p < PARTS; p++) {
        const __m512 scale = tile.scale(p);
        _mm512_store_ps(panel.scales[b][p][n], scale);
        _mm512_store_ps(panel.lifts[b][p][n], lift_of(scale));
        if (f.has_min) _mm512_store_ps(panel.minima[b][p][n], tile.minimum(p));
      }
    }
}

// What is fetched while a panel is multiplied: so many bytes of a block, groups `stride` apart.
struct Ahead {
  const uint8_t* tiles;  // or null
  int64_t bytes, stride;

  void fetch(int64_t block) const {
    if (!tiles) return;
    for (int n = 0; n < SEVERAL; n++)
      for (int64_t i = 0; i < bytes; i += 64)
        _mm_prefetch((const char*)tiles + n * stride + block * bytes + i, _MM_HINT_T0);
  }
};

// acc [R][SEVERAL][GROUP] += products of R rows with a panel. Formats that differ in their packing
// alone share it.
template <bool HAS_OFFSET, bool HAS_MIN, bool HAS_HALVES, int R>
__attribute__((noinline)) void multiply_several(const SeveralPanel& panel, int64_t blocks,
                                                int32_t offset, const Ahead& ahead,
                                                const Rows& rows, int64_t row, float* acc) {
  constexpr int PARTS = HAS_HALVES ? 2 : 1, VECTORS_OF_PART = 8 / PARTS;
  const uint8_t* x[R];
  UNROLL for (int r = 0; r < R; r++) x[r] = rows.values(row + r);
  const int64_t scales_at = (rows.blocks - rows.block) * 32 + rows.block * 4;
  const int64_t array = rows.blocks * 4;
  for (int64_t b = 0; b < blocks; b++) {
    ahead.fetch(b);
    const int64_t here = scales_at + b * 4 - b * 32;  // x moves on by a block
    UNROLL for (int p = 0; p < PARTS; p++) {
      __m512i sums[R][SEVERAL];
      UNROLL for (int r = 0; r < R; r++) {
        __m512i start = _mm512_set1_epi32(LIFT_BITS);
        if (HAS_OFFSET)
          start = lifted_start(offset, HAS_HALVES, p, word(x[r] + here + 2 * array));
        UNROLL for (int n = 0; n < SEVERAL; n++) sums[r][n] = start;
      }
      UNROLL for (int j = 0; j < VECTORS_OF_PART; j++) {
        const int g = p * VECTORS_OF_PART + j;
        __m512i v[SEVERAL];
        UNROLL for (int n = 0; n < SEVERAL; n++) v[n] = _mm512_load_si512(panel.q[b][g][n]);
        UNROLL for (int r = 0; r < R; r++) {
          const __m512i four = _mm512_set1_epi32(word(x[r] + 4 * g));
          UNROLL for (int n = 0; n < SEVERAL; n++)
              sums[r][n] = _mm512_dpbusd_epi32(sums[r][n], v[n], four);
        }
      }
      UNROLL for (int n = 0; n < SEVERAL; n++) {
        const __m512 scale = _mm512_load_ps(panel.scales[b][p][n]);
        const __m512 lift = _mm512_load_ps(panel.lifts[b][p][n]);
        const __m512 minimum = HAS_MIN ? _mm512_load_ps(panel.minima[b][p][n]) : scale;
        UNROLL for (int r = 0; r < R; r++) {
          float* to = acc + (r * SEVERAL + n) * GROUP;
          _mm512_store_ps(to, add_lifted<HAS_MIN, HAS_HALVES>(sums[r][n], scale, lift, minimum, p,
                                                              x[r] + here, array,
                                                              _mm512_load_ps(to)));
        }
        // Totals stay in memory: a compiler that carries them from block to block has no registers
        // for them, and moves each twice.
        asm volatile("" ::: "memory");
      }
    }
    UNROLL for (int r = 0; r < R; r++) x[r] += BLOCK;
  }
}

// Rows that go together when so many are left: as many as go, and none by themselves if others are
// there to go with them.
inline int64_t rows_together(int64_t left) {
  if (left == SEVERAL_ROWS || (left > 8 && left != 11)) return SEVERAL_ROWS;
  if (left == 4 || left > 6) return 4;
  return left > 3 ? 3 : left;
}

template <bool HAS_OFFSET, bool HAS_MIN, bool HAS_HALVES>
inline void walk_several(const SeveralPanel& panel, int64_t blocks, int32_t offset,
                         const Ahead& ahead, const Rows& rows, int64_t row, int64_t end,
                         float* acc) {
  for (int64_t count; row < end; row += count) {
    count = rows_together(end - row);
    auto* const multiply = count == 6   ? multiply_several<HAS_OFFSET, HAS_MIN, HAS_HALVES, 6>
                           : count == 4 ? multiply_several<HAS_OFFSET, HAS_MIN, HAS_HALVES, 4>
                           : count == 3 ? multiply_several<HAS_OFFSET, HAS_MIN, HAS_HALVES, 3>
                           : count == 2 ? multiply_several<HAS_OFFSET, HAS_MIN, HAS_HALVES, 2>
                                        : multiply_several<HAS_OFFSET, HAS_MIN, HAS_HALVES, 1>;
    multiply(panel, blocks, offset, ahead, rows, row, acc + row * SEVERAL * GROUP);
  }
}

template <FormatId F>
void several_unit(const LinearArgs& args, int64_t group, int64_t begin, int64_t end,
                  uint8_t* scratch) {
  constexpr Format f = FORMATS[F];
  constexpr int64_t BYTES = f.tile_bytes();
  const int64_t blocks = blocks_of(args.k), count = end - begin, stride = group_bytes(F, args.k);
  const uint8_t* tiles = args.tiles + group * stride;
  float* acc = (float*)scratch;
  std::memset(acc, 0, sizeof(float) * GROUP * SEVERAL * count);
  SeveralPanel& panel = *(SeveralPanel*)(scratch + sizeof(float) * GROUP * SEVERAL * PANEL_ROWS);
  Rows rows{args.x + begin * args.x_bytes, args.x_bytes, blocks, 0};
  const int64_t panels = (blocks + SeveralPanel::BLOCKS - 1) / SeveralPanel::BLOCKS;
  for (int64_t p = 0; p < panels; p++) {
    rows.block = blocks * p / panels;
    const int64_t stop = blocks * (p + 1) / panels, here = stop - rows.block;
    const bool is_last = p == panels - 1;
    unpack_several<F>(tiles + rows.block * BYTES, stride, here, panel);
    Ahead ahead{is_last ? tiles + SEVERAL * stride : tiles + stop * BYTES, BYTES, stride};
    for (int64_t row = 0, to; row < count; row = to, ahead.tiles = nullptr) {
      to = row + (ahead.tiles ? SEVERAL_ROWS : SEVERAL_STEP);
      if (to > count) to = count;
      if (is_last)
        for (int n = 0; n < SEVERAL; n++)
          fetch_outputs(args, group + n, begin + row, begin + to);
      walk_several<f.offset != 0, f.has_min, f.has_halves>(panel, here, f.offset, ahead, rows, row, to,
                                                          acc);
      for (int64_t r = row; is_last && r < to; r++) {
          float* sums = acc + r * SEVERAL * GROUP;
          add_apart<F, SEVERAL>(tiles, stride, rows, r, sums);
          for (int n = 0; n < SEVERAL; n++) finish(args, group + n, begin + r, sums + n * GROUP);
        }
    }
  }
}

}  // namespace
}  // namespace banyan
