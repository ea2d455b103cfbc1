// From the blocks of a checkpoint to tiles, and to rows of an embedding.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "linear_blocks.inl"
#include "pack.h"

namespace banyan {
namespace {

float float_at(int32_t source, const uint8_t* row, int64_t k) {
  if (source == S_F32) {
    float v;
    std::memcpy(&v, row + 4 * k, 4);
    return v;
  }
  if (source == S_E4M3) {
    const uint8_t* block = row + k / BLOCK * LAYOUTS[S_E4M3].bytes;
    float scale;
    std::memcpy(&scale, block + BLOCK, 4);
    return from_e4m3(block[k % BLOCK]) * (scale * 256.0f);
  }
  uint16_t v;
  std::memcpy(&v, row + 2 * k, 2);
  return source == S_F16 ? from_fp16(v) : from_bf16(v);
}

// The fp16 next to a scale, and what its values are to be divided by.
float rounded(float scale) { return from_fp16(to_fp16(scale)); }
uint8_t nearest(float x, float inverse, int offset, int most) {
  float q = std::nearbyint(x * inverse) + (float)offset;
  return (uint8_t)(q < 0 ? 0 : q > (float)most ? (float)most : q);
}

// Floats to 32 values of W8, W4 or W4_MIN.
void quantize(int32_t format, const float* x, Values& v) {
  float low = x[0], high = x[0], far = 0;
  for (int i = 0; i < BLOCK; i++) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    if (std::fabs(x[i]) > std::fabs(far)) far = x[i];
  }
  float minimum = format == W4_MIN ? rounded(low) : 0.0f;
  // W4 reaches from -8 to 7: the value farthest from zero becomes -8.
  float scale = rounded(format == W8 ? std::fabs(far) / 127.0f
                        : format == W4 ? far / -8.0f
                                       : (high - low) / 15.0f);
  float inverse = scale != 0 ? 1.0f / scale : 0.0f;
  for (int i = 0; i < BLOCK; i++)
    v.q[i] = nearest(x[i] - minimum, inverse, FORMATS[format].offset, format == W8 ? 255 : 15);
  set(v, scale, minimum);
}

// Lay 32 values of one output into a tile. Four values are a word, and no bit of one value meets
// another's: the loops have no branches per value.
template <int32_t FORMAT>
inline void place(const Values& v, int output, float factor, uint8_t* tile) {
  constexpr Format f = FORMATS[FORMAT];
  for (int p = 0; p < f.parts(); p++) {
    uint16_t scale = to_fp16(v.scale[p] / factor);
    std::memcpy(tile + (p * GROUP + output) * 2, &scale, 2);
    if constexpr (f.has_min) {
      uint16_t minimum = to_fp16(v.minimum[p] / factor);
      std::memcpy(tile + f.scale_bytes() + (p * GROUP + output) * 2, &minimum, 2);
    }
  }
  uint8_t* to = tile + output * 4;
  uint32_t w[8], high = 0;
  std::memcpy(w, v.q, sizeof w);
  if constexpr (f.bits == 8) {
    for (int g = 0; g < 8; g++) std::memcpy(to + f.low_at() + g * 64, &w[g], 4);
    return;
  }
  for (int z = 0; z < 4; z++) {
    uint32_t low = (w[2 * z] & 0x0f0f0f0f) | (w[2 * z + 1] & 0x0f0f0f0f) << 4;
    std::memcpy(to + f.low_at() + z * 64, &low, 4);
  }
  if constexpr (f.bits == 5) {
    for (int g = 0; g < 8; g++) high |= (w[g] >> 4 & 0x01010101) << g;
    std::memcpy(to + f.high_at(), &high, 4);
  }
  if constexpr (f.bits == 6)
    for (int h = 0; h < 2; h++, high = 0) {
      for (int g = 0; g < 4; g++) high |= (w[4 * h + g] >> 4 & 0x03030303) << 2 * g;
      std::memcpy(to + f.high_at() + h * 64, &high, 4);
    }
}

template <int32_t S>
float factor_of(const uint8_t* row, int64_t k) {
  constexpr int per = LAYOUTS[S].values / BLOCK;
  float most = 0;
  Values v;
  for (int64_t i = 0; i < blocks_of(k); i++) {
    scales<S>(row + i / per * LAYOUTS[S].bytes, (int)(i % per), v);
    for (int p = 0; p < 2; p++) {
      most = std::fmax(most, std::fabs(v.scale[p]));
      most = std::fmax(most, std::fabs(v.minimum[p]));
    }
  }
  return factor_for(most);
}

void pack_pairs(const PackArgs& args, int64_t group, uint8_t* to) {
  const int64_t pairs = args.k / 2;
  for (int i = 0; i < args.rows(group); i++) {
    const uint8_t* row = args.row(group, i);
    uint8_t* place = to + i * 4;
    for (int64_t p = 0; p < pairs; p++) std::memcpy(place + p * GROUP * 4, row + p * 4, 4);
    if (args.k % 2) {
      const uint32_t zero = 0;
      std::memcpy(place + pairs * GROUP * 4, &zero, 4);
      std::memcpy(place + pairs * GROUP * 4, row + pairs * 4, 2);
    }
  }
}

void pack_floats(const PackArgs& args, int64_t group, uint8_t* to) {
  int64_t bytes = args.format == F32 ? 4 : 2;
  for (int i = 0; i < args.rows(group); i++) {
    const uint8_t* row = args.row(group, i);
    for (int64_t b = 0; b < blocks_of(args.k) && args.format == E4M3; b++) {
      const uint8_t* block = row + b * LAYOUTS[S_E4M3].bytes;
      uint8_t* tile = to + b * E4M3_TILE;
      float scale;
      std::memcpy(&scale, block + BLOCK, 4);
      scale *= 256.0f;
      std::memcpy(tile + i * 4, &scale, 4);
      for (int l = 0; l < BLOCK; l++) tile[e4m3_at(l, i)] = block[l];
    }
    if (args.format == E4M3) continue;
    for (int64_t k = 0; k < args.k; k++)
      std::memcpy(to + (k * GROUP + i) * bytes, row + k * bytes, bytes);
  }
}

// Blocks of a checkpoint: tile by tile, so that what is written is written once and front to back.
template <int32_t S>
void pack_blocks(const PackArgs& args, int64_t group, uint8_t* to) {
  constexpr Layout layout = LAYOUTS[S];
  constexpr int per = layout.values / BLOCK;
  const int rows = args.rows(group);
  float* factors = args.factors + group * GROUP;
  if (layout.has_wide_scales)
    for (int i = 0; i < rows; i++) factors[i] = factor_of<S>(args.row(group, i), args.k);
  for (int64_t b = 0; b < blocks_of(args.k); b++, to += FORMATS[layout.format].tile_bytes())
    for (int i = 0; i < rows; i++) {
      const uint8_t* block = args.row(group, i) + b / per * layout.bytes;
      Values v;
      scales<S>(block, (int)(b % per), v);
      quants<S>(block, (int)(b % per), v.q);
      place<layout.format>(v, i, factors[i], to);
    }
}

template <int32_t FORMAT>
void pack_rounded(const PackArgs& args, int64_t group, uint8_t* to) {
  for (int64_t b = 0; b < blocks_of(args.k); b++, to += FORMATS[FORMAT].tile_bytes())
    for (int i = 0; i < args.rows(group); i++) {
      const uint8_t* row = args.row(group, i);
      float x[BLOCK];
      for (int64_t l = 0; l < BLOCK; l++)
        x[l] = b * BLOCK + l < args.k ? float_at(args.source, row, b * BLOCK + l) : 0.0f;
      Values v;
      quantize(FORMAT, x, v);
      place<FORMAT>(v, i, 1.0f, to);
    }
}

template <int... S>
constexpr PackGroup packer(int32_t source, std::integer_sequence<int, S...>) {
  constexpr PackGroup all[] = {pack_blocks<S_Q4_0 + S>...};
  return all[source - S_Q4_0];
}
constexpr auto BLOCK_SOURCES = std::make_integer_sequence<int, NUM_SOURCES - S_Q4_0>();

PackGroup plain_packer(int32_t source, int32_t format) {
  if (format == BF16_PAIRS) return pack_pairs;
  if (format >= NUM_QUANTISED) return pack_floats;
  if (source >= S_Q4_0) return packer(source, BLOCK_SOURCES);
  return format == W8 ? pack_rounded<W8> : format == W4 ? pack_rounded<W4> : pack_rounded<W4_MIN>;
}

PackGroup quick_packer(int32_t level, int32_t source, int32_t format) {
#ifdef BN_PACK_AVX512
  if (level >= AVX512) return pack_avx512(source, format);
#endif
#ifdef BN_PACK_AVX2
  if (level >= AVX2) return pack_avx2(source, format);
#endif
  (void)level, (void)source, (void)format;
  return nullptr;
}

void pack_group(const PackArgs& args, PackGroup quick, int64_t group) {
  int64_t bytes = group_bytes(args.format, args.k);
  uint8_t* to = args.tiles + group * bytes;
  for (int i = 0; i < GROUP; i++) args.factors[group * GROUP + i] = 1.0f;
  const bool is_full = args.rows(group) == GROUP;
  if (!is_full) std::memset(to, 0, bytes);
  const bool is_whole = is_full && args.k % LAYOUTS[args.source].values == 0;
  (quick && is_whole ? quick : plain_packer(args.source, args.format))(args, group, to);
}

int64_t pack_units(const void* a, const Sizes&) { return groups_of(((const PackArgs*)a)->n); }
int64_t one(const void*, const Sizes&) { return 1; }
void pack_run(const void* a, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const PackArgs& args = *(const PackArgs*)a;
  const PackGroup quick = quick_packer(isa(), args.source, args.format);
  for (int64_t g = begin; g < end; g++) pack_group(args, quick, g);
}
void pack_cost(const void* a, const Sizes&, double* bytes, double* operations) {
  const PackArgs& args = *(const PackArgs*)a;
  *bytes = (double)(args.n * args.row_bytes) +
           (double)(groups_of(args.n) * group_bytes(args.format, args.k));
  *operations = (double)args.n * (double)args.k;
}
const Kernel PACK = {"pack_linear", pack_units, one, pack_run, pack_cost};

struct RowsArgs {
  int32_t source, size;
  const int64_t* ids;
  const uint8_t* raw;
  int64_t row_bytes, ids_count, k, first;
  float scale;
  float* out;
  int64_t out_stride;
};

template <int32_t S>
void read_blocks(const uint8_t* row, int64_t k, float* out) {
  constexpr Layout layout = LAYOUTS[S];
  constexpr Format f = FORMATS[layout.format];
  constexpr int per = layout.values / BLOCK;
  Values v;
  for (int64_t b = 0; b < blocks_of(k); b++) {
    const uint8_t* block = row + b / per * layout.bytes;
    scales<S>(block, (int)(b % per), v);
    quants<S>(block, (int)(b % per), v.q);
    for (int l = 0; l < BLOCK; l++)
      out[b * BLOCK + l] =
          v.scale[l / 16] * (float)(f.number(v.q[l]) - f.offset) +
          v.minimum[l / 16];
  }
}

typedef void (*ReadRow)(const uint8_t* row, int64_t k, float* out);
template <int... S>
constexpr ReadRow reader(int32_t source, std::integer_sequence<int, S...>) {
  constexpr ReadRow all[] = {read_blocks<S_Q4_0 + S>...};
  return all[source - S_Q4_0];
}

void read_row(int32_t source, const uint8_t* row, int64_t k, float* out) {
  if (source >= S_Q4_0) return reader(source, BLOCK_SOURCES)(row, k, out);
  for (int64_t i = 0; i < k; i++) out[i] = float_at(source, row, i);
}

int64_t rows_units(const void* a, const Sizes& sizes) {
  return sizes.n[((const RowsArgs*)a)->size];
}
int64_t rows_grain(const void* a, const Sizes&) {
  return 10000 / (2 * ((const RowsArgs*)a)->k + 1) + 1;
}
void rows_run(const void* a, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const RowsArgs& args = *(const RowsArgs*)a;
  for (int64_t i = begin; i < end; i++) {
    int64_t id = args.ids[i] - args.first;
    float* out = args.out + i * args.out_stride;
    if (id < 0 || id >= args.ids_count) {
      std::memset(out, 0, sizeof(float) * args.k);
      continue;
    }
    read_row(args.source, args.raw + id * args.row_bytes, args.k, out);
    if (args.scale != 1.0f)
      for (int64_t k = 0; k < args.k; k++) out[k] *= args.scale;
  }
}
void rows_cost(const void* a, const Sizes& sizes, double* bytes, double* operations) {
  const RowsArgs& args = *(const RowsArgs*)a;
  double rows = (double)sizes.n[args.size];
  *bytes = rows * (double)(args.row_bytes + 4 * args.k);
  *operations = rows * 2 * (double)args.k;
}
const Kernel EMBEDDING = {"embedding", rows_units, rows_grain, rows_run, rows_cost};

}  // namespace
}  // namespace banyan

using namespace banyan;

// The format that a type of checkpoint weights is packed into; -1 for an unknown type.
BN_EXPORT int32_t bn_linear_format(int32_t source) {
  return source >= 0 && source < NUM_SOURCES ? LAYOUTS[source].format : -1;
}

// Weights [n, k] as stored, rows row_bytes apart, into tiles of `format`: the type's own, or W8, W4
// or W4_MIN for floats, or BF16_PAIRS for bf16. tiles: [bn_linear_bytes(format, n, k)]; factors: [n up to a multiple of 16].
BN_EXPORT void bn_pack_linear(Program* program, int32_t size, int32_t source, int32_t format,
                              const uint8_t* raw, int64_t row_bytes, int64_t n, int64_t k,
                              uint8_t* tiles, float* factors) {
  (void)size;
  PackArgs args{source, format, raw, row_bytes, n, k, tiles, factors};
  append(program, PACK, &args, sizeof args, NOT_ROW_WISE);
}

// Rows of a table [count, k] as stored, which holds the ids first, first + 1, ...; an id outside of
// it gives zeros. ids: [size]; scale: factor on every row; out: [size, k], rows out_stride apart.
BN_EXPORT void bn_embedding_rows(Program* program, int32_t size, const int64_t* ids, int32_t source,
                                 const uint8_t* raw, int64_t row_bytes, int64_t count, int64_t k,
                                 int64_t first, float scale, float* out, int64_t out_stride) {
  RowsArgs args{source, size, ids, raw, row_bytes, count, k, first, scale, out, out_stride};
  append(program, EMBEDDING, &args, sizeof args, size);
}

// Compare what an instruction set packs with what the plain code does; 0 = good.
BN_EXPORT int bn_check_pack(int32_t isa, char* why, int32_t room) {
  constexpr int64_t K = 512;
  uint64_t state = 88172645463325252ull;
  std::vector<uint8_t> raw(GROUP * K * 4);
  for (uint8_t& byte : raw) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    byte = (uint8_t)state;
  }
  for (int32_t i = 0; i <= NUM_SOURCES; i++) {  // bf16 once as pairs
    const int32_t source = i < NUM_SOURCES ? i : S_BF16;
    const Layout layout = LAYOUTS[source];
    const int32_t format = i < NUM_SOURCES ? layout.format : BF16_PAIRS;
    const PackGroup quick = quick_packer(isa, source, format);
    if (!quick) continue;
    const int64_t k = layout.values == 1 ? K - 1 : K, bytes = group_bytes(format, k);
    std::vector<uint8_t> tiles(2 * bytes + 64);
    uint8_t* want = tiles.data() + (64 - (uintptr_t)tiles.data() % 64) % 64;
    float factors[GROUP], found[GROUP];
    for (int o = 0; o < GROUP; o++) factors[o] = found[o] = 1.0f;
    PackArgs args{source, format, raw.data(), k / layout.values * layout.bytes, GROUP, k, want, factors};
    plain_packer(source, format)(args, 0, args.tiles);
    args.tiles = want + bytes, args.factors = found;
    quick(args, 0, args.tiles);
    if (std::memcmp(want, want + bytes, bytes) || std::memcmp(factors, found, sizeof found)) {
      std::snprintf(why, room, "type %d: tiles differ", source);
      return 1;
    }
  }
  return 0;
}
