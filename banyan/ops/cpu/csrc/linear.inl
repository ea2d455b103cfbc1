// What all instruction sets share: products with fp32 activations, and the walk of one group of
// outputs over its rows. The including file has defined before, in this namespace:
//
//   ROWS, UNPACKED_ROWS  rows of the largest `multiply` on tiles and on a panel, next_rows(R) the one
//                        below; up to direct_rows(format) rows go without a panel
//   Tile<F>, Unpacked<F> the two sources of weights; Tile<F>::unpack fills a Panel
//   multiply<Source, R>  acc[r][0 ... 15] += products of R rows with `blocks` blocks
//
// A (row, output) sees the same sequence of operations whatever R and the source are: blocks in
// rising order, for each part  sum of products exact in integers,
// acc = fma(sum, scale * x_scale, acc), and acc = fma(minimum, x_sum, acc) if there are minima; after
// all blocks what is kept apart, in the order of the row.
namespace banyan {
namespace {

constexpr int64_t EXACT_CHUNK = 256;  // inputs whose weights are brought to fp32 at a time
constexpr int VECTORS = GROUP / LANES;

// out = acc * factor + bias.
inline void finish(const LinearArgs& args, int64_t group, int64_t row, const float* acc) {
  int64_t first = group * GROUP, left = args.n - first;
  const float* factors = args.factors + first;
  float* out = args.out + row * args.out_stride + first;
  float tail[GROUP];
  float* to = left < GROUP ? tail : out;
  for (int i = 0; i < GROUP; i += LANES) {
    vf bias{};
    if (args.bias && left >= GROUP) bias = load(args.bias + first + i);
    else if (args.bias && left > i)
      bias = load_some(args.bias + first + i, left - i < LANES ? (int)(left - i) : LANES);
    store(to + i, fma(load(acc + i), load(factors + i), bias));
  }
  if (left < GROUP) std::memcpy(out, tail, sizeof(float) * left);
}

// As many rows at a time as go.
template <class Source, int R>
inline void walk_rows(const Source& source, int64_t count, const Rows& rows, int64_t row,
                      int64_t end, float* acc) {
  for (; row + R <= end; row += R) multiply<Source, R>(source, count, rows, row, acc + row * GROUP);
  if constexpr (R > 1)
    if (row < end) walk_rows<Source, next_rows(R)>(source, count, rows, row, end, acc);
}

// acc [N][GROUP] += what is kept apart * its weights, for N groups `stride` apart: fp32, one after the
// other.
template <FormatId F, int N>
inline void add_apart(const uint8_t* tiles, int64_t stride, const Rows& rows, int64_t row,
                      float* acc) {
  constexpr Format f = FORMATS[F];
  const float* values = rows.apart(row);
  const uint32_t* places = rows.places(row);
  vf total[N * VECTORS];
  for (int i = 0; i < N * VECTORS; i++) total[i] = load(acc + i * LANES);
  for (int64_t e = 0; e < apart_of(rows.blocks); e++) {
    const uint32_t place = places[e], input = place % BLOCK;
    const uint32_t g = input / 4, byte = input % 4 * 8;  // the vector, and where in 32 bits
    const uint8_t* tile = tiles + place / BLOCK * f.tile_bytes();
    for (int n = 0; n < N; n++, tile += stride) {
      const uint8_t* low = tile + f.low_at() + (f.bits == 8 ? g : g / 2) * 64;
      const uint8_t* high = tile + f.high_at() + (f.bits == 6 ? g / 4 * 64 : 0);
      const uint16_t* scales = (const uint16_t*)tile + (f.has_halves ? input / 16 * GROUP : 0);
      const uint16_t* minima = (const uint16_t*)((const uint8_t*)scales + f.scale_bytes());
      for (int i = 0; i < VECTORS; i++) {
        vi q;
        std::memcpy(&q, low + i * LANES * 4, sizeof q);
        q = f.bits == 8 ? q >> byte & 255 : q >> (byte + g % 2 * 4) & 15;
        if (f.bits == 5 || f.bits == 6) {
          vi top;
          std::memcpy(&top, high + i * LANES * 4, sizeof top);
          q |= (f.bits == 5 ? top >> (byte + g) & 1 : top >> (byte + g % 4 * 2) & 3) << 4;
        }
        if (f.levels) q = look_up(f.levels->q, q);
        vf low_end = f.has_min ? load_fp16(minima + i * LANES) : vf{};
        vf weight = fma(load_fp16(scales + i * LANES), to_float(q - f.offset), low_end);
        vf& sum = total[n * VECTORS + i];
        sum = fma(splat(values[e]), weight, sum);
      }
    }
  }
  for (int i = 0; i < N * VECTORS; i++) store(acc + i * LANES, total[i]);
}

// The lines that results will be written to, on their way into the cache while products are made.
inline void fetch_outputs(const LinearArgs& args, int64_t group, int64_t row, int64_t end) {
  for (; row < end; row++) __builtin_prefetch(args.out + row * args.out_stride + group * GROUP, 1);
}

// Rows whose blocks are all added: what is kept apart, and out.
template <FormatId F>
inline void finish_rows(const LinearArgs& args, int64_t group, int64_t begin, const uint8_t* tiles,
                        const Rows& rows, int64_t row, int64_t end, float* acc) {
  for (; row < end; row++) {
    add_apart<F, 1>(tiles, 0, rows, row, acc + row * GROUP);
    finish(args, group, begin + row, acc + row * GROUP);
  }
}

// Straight from the tiles: the first rows bring the group to a cache, where the others find it.
template <FormatId F>
inline void from_tiles(const LinearArgs& args, int64_t group, int64_t begin, int64_t count,
                       const uint8_t* tiles, const Rows& rows, float* acc) {
  for (int64_t row = 0, to; row < count; row = to) {
    to = row + ROWS < count ? row + ROWS : count;
    fetch_outputs(args, group, begin + row, begin + to);
    walk_rows<Tile<F>, ROWS>(Tile<F>{tiles}, rows.blocks, rows, row, to, acc);
    finish_rows<F>(args, group, begin, tiles, rows, row, to, acc);
  }
}

// Through panels, which many rows share.
template <FormatId F>
inline void through_panels(const LinearArgs& args, int64_t group, int64_t begin, int64_t count,
                           const uint8_t* tiles, Rows rows, float* acc) {
  constexpr int64_t BYTES = FORMATS[F].tile_bytes();
  constexpr int64_t STEP = UNPACKED_ROWS < 8 ? 8 * UNPACKED_ROWS : UNPACKED_ROWS;  // rows
  Panel& panel = *(Panel*)(acc + GROUP * PANEL_ROWS);
  const int64_t blocks = rows.blocks, panels = (blocks + Panel::BLOCKS - 1) / Panel::BLOCKS;
  for (int64_t p = 0; p < panels; p++) {  // of nearly equal size: sums are read and written for each
    rows.block = blocks * p / panels;
    const int64_t here = blocks * (p + 1) / panels - rows.block;
    unpack(Tile<F>{tiles + rows.block * BYTES}, here, panel);
    // The first rows fetch what comes next: few rows would wait for the memory otherwise.
    const uint8_t* next = tiles + (rows.block + here) * BYTES;
    for (int64_t row = 0, to; row < count; row = to, next = nullptr) {
      to = row + (next ? UNPACKED_ROWS : STEP);
      if (to > count) to = count;
      if (p == panels - 1) fetch_outputs(args, group, begin + row, begin + to);
      walk_rows<Unpacked<F>, UNPACKED_ROWS>({&panel, next}, here, rows, row, to, acc);
      if (p == panels - 1) finish_rows<F>(args, group, begin, tiles, rows, row, to, acc);
    }
  }
}

template <FormatId F>
void rounded_unit(const LinearArgs& args, int64_t group, int64_t begin, int64_t end,
                  uint8_t* scratch) {
  constexpr int64_t DIRECT = direct_rows(FORMATS[F]);
  const int64_t count = end - begin;
  const uint8_t* tiles = args.tiles + group * group_bytes(F, args.k);
  const Rows rows{args.x + begin * args.x_bytes, args.x_bytes, blocks_of(args.k), 0};
  float* acc = (float*)scratch;
  std::memset(acc, 0, sizeof(float) * GROUP * count);
  if (count <= DIRECT) return from_tiles<F>(args, group, begin, count, tiles, rows, acc);
  if constexpr (DIRECT < PANEL_ROWS)
    through_panels<F>(args, group, begin, count, tiles, rows, acc);
}

// Products with fp32 activations: acc = fma(x, w, acc), inputs in rising order.

struct WideRows {
  const uint8_t* x;
  int64_t bytes, first;  // from row to row; first input
};

struct Floats {
  const float* w;
  vf at(int64_t k, int i) const { return load(w + k * GROUP + i * LANES); }
};
struct Halfs {
  const uint16_t* w;
  vf at(int64_t k, int i) const { return load_fp16(w + k * GROUP + i * LANES); }
};
struct Brains {
  const uint16_t* w;
  vf at(int64_t k, int i) const { return load_bf16(w + k * GROUP + i * LANES); }
};

constexpr int WIDE_ROWS = LANES == 4 ? 2 : LANES == 8 ? 6 : 12;

template <class Source, int R>
inline void wide_rows(const Source& w, int64_t count, const WideRows& rows, int64_t row,
                      int64_t end, float* acc) {
  for (; row + R <= end; row += R) {
    const float* x[R];
    vf sum[R][VECTORS];
    for (int r = 0; r < R; r++) {
      x[r] = (const float*)(rows.x + (row + r) * rows.bytes) + rows.first;
      for (int i = 0; i < VECTORS; i++) sum[r][i] = load(acc + (row + r) * GROUP + i * LANES);
    }
    for (int64_t k = 0; k < count; k++) {
      vf v[VECTORS];
      for (int i = 0; i < VECTORS; i++) v[i] = w.at(k, i);
      for (int r = 0; r < R; r++)
        for (int i = 0; i < VECTORS; i++) sum[r][i] = fma(splat(x[r][k]), v[i], sum[r][i]);
    }
    for (int r = 0; r < R; r++)
      for (int i = 0; i < VECTORS; i++) store(acc + (row + r) * GROUP + i * LANES, sum[r][i]);
  }
  if constexpr (R > 1)
    if (row < end) wide_rows<Source, (R > 6 ? 6 : R > 2 ? 2 : 1)>(w, count, rows, row, end, acc);
}

// Products with floats of 8 bits: in a block two sums, of every other input each, so that neither waits
// for the other; then acc = fma(first + second, scale, acc).
template <int R>
inline void eighth_rows(const float* wide, const uint8_t* tiles, int64_t count, const WideRows& rows,
                        int64_t row, int64_t end, float* acc) {
  for (; row + R <= end; row += R) {
    const float* x[R];
    vf sum[R][VECTORS];
    for (int r = 0; r < R; r++) {
      x[r] = (const float*)(rows.x + (row + r) * rows.bytes) + rows.first;
      for (int i = 0; i < VECTORS; i++) sum[r][i] = load(acc + (row + r) * GROUP + i * LANES);
    }
    for (int64_t k = 0; k < count; k += BLOCK) {
      const float* scales = (const float*)(tiles + k / BLOCK * E4M3_TILE);
      vf total[R][VECTORS];
      for (int j = 0; j < 2; j++) {
        vf part[R][VECTORS] = {};
        for (int64_t m = k + j; m < k + BLOCK; m += 2) {
          vf v[VECTORS];
          for (int i = 0; i < VECTORS; i++) v[i] = load(wide + m * GROUP + i * LANES);
          for (int r = 0; r < R; r++)
            for (int i = 0; i < VECTORS; i++) part[r][i] = fma(splat(x[r][m]), v[i], part[r][i]);
        }
        for (int r = 0; r < R; r++)
          for (int i = 0; i < VECTORS; i++)
            total[r][i] = j ? total[r][i] + part[r][i] : part[r][i];
      }
      for (int r = 0; r < R; r++)
        for (int i = 0; i < VECTORS; i++)
          sum[r][i] = fma(total[r][i], load(scales + i * LANES), sum[r][i]);
    }
    for (int r = 0; r < R; r++)
      for (int i = 0; i < VECTORS; i++) store(acc + (row + r) * GROUP + i * LANES, sum[r][i]);
  }
  if constexpr (R > 1)
    if (row < end)
      eighth_rows<(R > 6 ? 6 : R > 2 ? 2 : 1)>(wide, tiles, count, rows, row, end, acc);
}

// The same sums of a lone row, straight from the tiles.
inline void eighth_row(const uint8_t* tiles, int64_t count, const float* x, float* acc) {
#ifdef BN_LOOKUP_ROW
  if (has_byte_lookup()) return BN_LOOKUP_ROW(tiles, count, x, acc);
#endif
  vf sum[VECTORS] = {};
  for (int64_t k = 0; k < count; k += BLOCK, tiles += E4M3_TILE, x += BLOCK) {
    vf part[2][VECTORS] = {};
    for (int m = 0; m < BLOCK; m += 4)
      for (int i = 0; i < VECTORS; i++) {
        vf v[4];
        load_e4m3(tiles + GROUP * (4 + m) + i * LANES * 4, v);
        for (int j = 0; j < 4; j++) part[j % 2][i] = fma(splat(x[m + j]), v[j], part[j % 2][i]);
      }
    for (int i = 0; i < VECTORS; i++)
      sum[i] = fma(part[0][i] + part[1][i], load((const float*)tiles + i * LANES), sum[i]);
  }
  for (int i = 0; i < VECTORS; i++) store(acc + i * LANES, sum[i]);
}

// Blocks of floats of 8 bits as fp32, without their scales.
inline void widen_eighths(const uint8_t* tiles, int64_t count, float* wide) {
  for (int64_t k = 0; k < count; k += 4)
    for (int i = 0; i < VECTORS; i++) {
      vf v[4];
      load_e4m3(tiles + k / BLOCK * E4M3_TILE + GROUP * (4 + k % BLOCK) + i * LANES * 4, v);
      for (int j = 0; j < 4; j++) store(wide + (k + j) * GROUP + i * LANES, v[j]);
    }
}

// Weights of `blocks` blocks as fp32: scale * (q - offset) + minimum.
template <FormatId F>
inline void widen(const Panel& panel, int64_t blocks, float* wide) {
  constexpr Format f = FORMATS[F];
  constexpr int GROUPS = 8 / f.parts();  // of four inputs, per part
  for (int64_t b = 0; b < blocks; b++)
    for (int p = 0; p < f.parts(); p++)
      for (int i = 0; i < VECTORS; i++) {
        vf scale = load(panel.scales[b][p] + i * LANES);
        vf low = f.has_min ? load(panel.minima[b][p] + i * LANES) : vf{};
        for (int g = p * GROUPS; g < (p + 1) * GROUPS; g++) {
          vi four;
          std::memcpy(&four, panel.q[b][g] + i * LANES * 4, sizeof four);
          for (int j = 0; j < 4; j++) {
            vi q = (four >> (8 * j) & 255) - f.offset;
            store(wide + (b * BLOCK + 4 * g + j) * GROUP + i * LANES,
                  scale * to_float(q) + low);
          }
        }
      }
}

// A chunk of the weights of a group as fp32, [input][16 outputs]; of the formats whose products are
// those of fp32 then.
template <FormatId F>
inline void widen_chunk(const uint8_t* tiles, int64_t first, int64_t count, Panel& panel,
                        float* wide) {
  if constexpr (F < NUM_QUANTISED) {
    unpack(Tile<F>{tiles + first / BLOCK * FORMATS[F].tile_bytes()}, blocks_of(count), panel);
    widen<F>(panel, blocks_of(count), wide);
  } else {
    const uint16_t* from = (const uint16_t*)tiles + first * GROUP;
    for (int64_t i = 0; i < count * GROUP; i += LANES)
      store(wide + i, F == F16 ? load_fp16(from + i) : load_bf16(from + i));
  }
}

template <FormatId F>
void exact_unit(const LinearArgs& args, int64_t group, int64_t begin, int64_t end,
                uint8_t* scratch) {
  int64_t count = end - begin;
  const uint8_t* tiles = args.tiles + group * group_bytes(F, args.k);
  float* acc = (float*)scratch;
  std::memset(acc, 0, sizeof(float) * GROUP * count);
  float* wide = acc + GROUP * PANEL_ROWS;
  WideRows rows{args.x + begin * args.x_bytes, args.x_bytes, 0};
  if (F == E4M3 && count == 1) {
    eighth_row(tiles, args.k, (const float*)rows.x, acc);
  } else if (F >= NUM_QUANTISED && F != E4M3 && (F == F32 || count <= WIDE_ROWS)) {
    if constexpr (F == F32)
      wide_rows<Floats, WIDE_ROWS>({(const float*)tiles}, args.k, rows, 0, count, acc);
    if constexpr (F == F16)
      wide_rows<Halfs, WIDE_ROWS>({(const uint16_t*)tiles}, args.k, rows, 0, count, acc);
    if constexpr (F == BF16)
      wide_rows<Brains, WIDE_ROWS>({(const uint16_t*)tiles}, args.k, rows, 0, count, acc);
  } else {
    for (; rows.first < args.k; rows.first += EXACT_CHUNK) {
      int64_t here = args.k - rows.first < EXACT_CHUNK ? args.k - rows.first : EXACT_CHUNK;
      if constexpr (F == E4M3) {
        const uint8_t* from = tiles + rows.first / BLOCK * E4M3_TILE;
        widen_eighths(from, here, wide);
        eighth_rows<WIDE_ROWS>(wide, from, here, rows, 0, count, acc);
      } else {
        widen_chunk<F>(tiles, rows.first, here, *(Panel*)(wide + EXACT_CHUNK * GROUP), wide);
        wide_rows<Floats, WIDE_ROWS>({wide}, here, rows, 0, count, acc);
      }
    }
  }
  for (int64_t r = 0; r < count; r++) finish(args, group, begin + r, acc + r * GROUP);
}

// Of the formats that round activations: a template for the quantised ones, and what takes pairs.
#define BN_OF_ROUNDED(unit, pairs)                                                           \
  {                                                                                          \
    unit<W4>, unit<W4_MIN>, unit<W4_HALVES>, unit<W4_MIN_HALVES>, unit<W5>, unit<W5_MIN>,    \
        unit<W6_HALVES>, unit<W8>, unit<W4_E2M1>, unit<W4_IQ4>, unit<W4_IQ3>,                \
        unit<W4_IQ2_HALVES>, nullptr, nullptr, nullptr, nullptr, pairs                       \
  }
// Of those that `unit` does with fp32 activations.
#define BN_OF_WIDE(unit)                                                                     \
  {                                                                                          \
    unit<W4>, unit<W4_MIN>, unit<W4_HALVES>, unit<W4_MIN_HALVES>, unit<W5>, unit<W5_MIN>,    \
        unit<W6_HALVES>, unit<W8>, unit<W4_E2M1>, unit<W4_IQ4>, unit<W4_IQ3>,                \
        unit<W4_IQ2_HALVES>, unit<F32>, unit<F16>, unit<BF16>                                \
  }
// round_pairs, at_once and what follows it: as in LinearKernels; pairs: its rounded[BF16_PAIRS].
#define BN_LINEAR_KERNELS(round_pairs, pairs, at_once, ...)                                  \
  {                                                                                          \
    quantize_row, round_pairs, BN_OF_ROUNDED(rounded_unit, pairs),                           \
        {exact_unit<W4>, exact_unit<W4_MIN>, exact_unit<W4_HALVES>, exact_unit<W4_MIN_HALVES>, \
         exact_unit<W5>, exact_unit<W5_MIN>, exact_unit<W6_HALVES>, exact_unit<W8>,          \
         exact_unit<W4_E2M1>, exact_unit<W4_IQ4>, exact_unit<W4_IQ3>,                        \
         exact_unit<W4_IQ2_HALVES>,                                                          \
         exact_unit<F32>, exact_unit<F16>, exact_unit<BF16>, exact_unit<E4M3>},              \
        at_once, __VA_ARGS__                                                                 \
  }

}  // namespace
}  // namespace banyan
