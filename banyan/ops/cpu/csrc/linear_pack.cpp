// From the blocks of a checkpoint to tiles, and to rows of an embedding.
//
// Source of the block layouts: the GGUF specification (ggml-quants). Every type is read as values of
// 32 inputs in one common form, from which tiles and plain floats follow.
#include "linear.h"

#include <cmath>
#include <cstring>

#include "vec.h"

namespace banyan {
namespace {

enum Source : int32_t {
  S_F32, S_F16, S_BF16, S_Q4_0, S_Q4_1, S_Q5_0, S_Q5_1, S_Q8_0, S_Q2_K, S_Q3_K, S_Q4_K, S_Q5_K,
  S_Q6_K, S_IQ4_NL, S_MXFP4, NUM_SOURCES
};

// 32 weights: scale * (q - offset of the format) + minimum, scale and minimum per half. Where the
// format has levels, q is the number of one.
struct Values {
  uint8_t q[BLOCK];
  float scale[2], minimum[2];
};

struct Layout {
  int32_t format;
  int values, bytes;        // of a block
  bool has_wide_scales;     // scales are products that fp16 may not hold
};
constexpr Layout LAYOUTS[NUM_SOURCES] = {
    {F32, 1, 4, false},        {F16, 1, 2, false},          {BF16, 1, 2, false},
    {W4, 32, 18, false},       {W4_MIN, 32, 20, false},     {W5, 32, 22, false},
    {W5_MIN, 32, 24, false},   {W8, 32, 34, false},         {W4_MIN_HALVES, 256, 84, true},
    {W4_HALVES, 256, 110, true}, {W4_MIN, 256, 144, true},  {W5_MIN, 256, 176, true},
    {W6_HALVES, 256, 210, true}, {W8, 32, 18, false},
    {W4_LEVELS, 32, 17, true},
};
constexpr uint8_t IQ4_NL_LEVELS[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                       129, 141, 153, 166, 181, 197, 217, 241};  // + 128

float half_at(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return from_fp16(v);
}

void set(Values& v, float scale, float minimum) {
  v.scale[0] = v.scale[1] = scale;
  v.minimum[0] = v.minimum[1] = minimum;
}

void nibbles(Values& v, const uint8_t* low) {  // values 0 ... 15 low, 16 ... 31 high
  for (int i = 0; i < 16; i++) {
    v.q[i] = low[i] & 15;
    v.q[i + 16] = low[i] >> 4;
  }
}
void fifth_bits(Values& v, const uint8_t* high) {  // bit i belongs to value i
  for (int i = 0; i < 32; i++) v.q[i] |= (high[i / 8] >> i % 8 & 1) << 4;
}

// The 6-bit scale and minimum of sub-block i of Q4_K and Q5_K, from 12 bytes.
void scales_of_4_k(Values& v, const uint8_t* block, int i) {
  const uint8_t* s = block + 4;
  int scale = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | s[i - 4] >> 6 << 4;
  int minimum = i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | s[i] >> 6 << 4;
  set(v, half_at(block) * (float)scale, -(half_at(block + 2) * (float)minimum));
}

// Values 32 i ... of a row of type `source`.
void read(int32_t source, const uint8_t* row, int64_t i, Values& v) {
  const Layout& layout = LAYOUTS[source];
  int per = layout.values / BLOCK, sub = (int)(i % per), c = sub % 4, h = sub / 4;
  const uint8_t* block = row + i / per * layout.bytes;
  switch (source) {
    case S_Q4_0:
      nibbles(v, block + 2);
      return set(v, half_at(block), 0);
    case S_Q4_1:
      nibbles(v, block + 4);
      return set(v, half_at(block), half_at(block + 2));
    case S_Q5_0:
      nibbles(v, block + 6);
      fifth_bits(v, block + 2);
      return set(v, half_at(block), 0);
    case S_Q5_1:
      nibbles(v, block + 8);
      fifth_bits(v, block + 4);
      return set(v, half_at(block), half_at(block + 2));
    case S_Q8_0:
      for (int l = 0; l < 32; l++) v.q[l] = block[2 + l] ^ 0x80;
      return set(v, half_at(block), 0);
    case S_IQ4_NL:
      nibbles(v, block + 2);
      for (uint8_t& q : v.q) q = IQ4_NL_LEVELS[q];
      return set(v, half_at(block), 0);
    case S_MXFP4:  // the exponent is biased by 127, the levels are doubled
      nibbles(v, block + 1);
      return set(v, std::ldexp(1.0f, block[0] - 128), 0);
    case S_Q4_K:
      for (int l = 0; l < 32; l++) v.q[l] = block[16 + sub / 2 * 32 + l] >> sub % 2 * 4 & 15;
      return scales_of_4_k(v, block, sub);
    case S_Q5_K:
      for (int l = 0; l < 32; l++)
        v.q[l] = (uint8_t)((block[48 + sub / 2 * 32 + l] >> sub % 2 * 4 & 15) |
                           (block[16 + l] >> sub & 1) << 4);
      return scales_of_4_k(v, block, sub);
    case S_Q6_K:
      for (int l = 0; l < 32; l++)
        v.q[l] = (uint8_t)((block[h * 64 + c % 2 * 32 + l] >> c / 2 * 4 & 15) |
                           (block[128 + h * 32 + l] >> 2 * c & 3) << 4);
      for (int p = 0; p < 2; p++) {
        v.scale[p] = half_at(block + 208) * (float)(int8_t)block[192 + 2 * sub + p];
        v.minimum[p] = 0;
      }
      return;
    case S_Q2_K:
      for (int l = 0; l < 32; l++) v.q[l] = block[16 + h * 32 + l] >> 2 * c & 3;
      for (int p = 0; p < 2; p++) {
        uint8_t s = block[2 * sub + p];
        v.scale[p] = half_at(block + 80) * (float)(s & 15);
        v.minimum[p] = -(half_at(block + 82) * (float)(s >> 4));
      }
      return;
    case S_Q3_K:
      for (int l = 0; l < 32; l++)
        v.q[l] = (uint8_t)((block[32 + h * 32 + l] >> 2 * c & 3) | (block[l] >> sub & 1) << 2);
      for (int p = 0; p < 2; p++) {
        const uint8_t* s = block + 96;
        int j = 2 * sub + p;
        int scale = (s[j % 8] >> j / 8 * 4 & 15) | (s[8 + j % 4] >> j / 4 * 2 & 3) << 4;
        v.scale[p] = half_at(block + 108) * (float)(scale - 32);
        v.minimum[p] = 0;
      }
      return;
  }
}

float float_at(int32_t source, const uint8_t* row, int64_t k) {
  if (source == S_F32) {
    float v;
    std::memcpy(&v, row + 4 * k, 4);
    return v;
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

// Values i of a row of `k`, in the form of `format`.
void values_of(int32_t source, int32_t format, const uint8_t* row, int64_t k, int64_t i,
               Values& v) {
  if (source > S_BF16) return read(source, row, i, v);
  float x[BLOCK];
  for (int64_t l = 0; l < BLOCK; l++)
    x[l] = i * BLOCK + l < k ? float_at(source, row, i * BLOCK + l) : 0.0f;
  quantize(format, x, v);
}

// Lay 32 values of one output into a tile.
void place(int32_t format, const Values& v, int output, float factor, uint8_t* tile) {
  const Format& f = FORMATS[format];
  for (int p = 0; p < f.parts(); p++) {
    uint16_t scale = to_fp16(v.scale[p] / factor), minimum = to_fp16(v.minimum[p] / factor);
    std::memcpy(tile + (p * GROUP + output) * 2, &scale, 2);
    if (f.has_min) std::memcpy(tile + f.scale_bytes() + (p * GROUP + output) * 2, &minimum, 2);
  }
  uint8_t *low = tile + f.low_at(), *high = tile + f.high_at();
  for (int g = 0; g < 8; g++)
    for (int j = 0; j < 4; j++) {
      int q = v.q[4 * g + j], at = output * 4 + j;
      if (f.bits == 8)
        low[g * 64 + at] = (uint8_t)q;
      else
        low[g / 2 * 64 + at] |= (uint8_t)((q & 15) << g % 2 * 4);
      if (f.bits == 5) high[at] |= (uint8_t)(q >> 4 << g);
      if (f.bits == 6) high[g / 4 * 64 + at] |= (uint8_t)(q >> 4 << g % 4 * 2);
    }
}

// A power of two that brings the largest scale of a row below 2^14, so that products of two scales,
// which may be larger or far smaller than fp16 allows, keep their 11 bits.
float factor_of(const Layout& layout, int32_t source, const uint8_t* row, int64_t k) {
  if (!layout.has_wide_scales) return 1.0f;
  float most = 0;
  Values v;
  for (int64_t i = 0; i < blocks_of(k); i++) {
    read(source, row, i, v);
    for (int p = 0; p < 2; p++) {
      most = std::fmax(most, std::fabs(v.scale[p]));
      most = std::fmax(most, std::fabs(v.minimum[p]));
    }
  }
  if (most == 0 || !std::isfinite(most)) return 1.0f;
  return std::ldexp(1.0f, std::ilogb(most) - 13);
}

struct PackArgs {
  int32_t source, format;
  const uint8_t* raw;
  int64_t row_bytes, n, k;
  uint8_t* tiles;
  float* factors;
};

void pack_floats(const PackArgs& args, int64_t group, uint8_t* to) {
  int64_t left = args.n - group * GROUP, bytes = args.format == F32 ? 4 : 2;
  for (int i = 0; i < GROUP && i < left; i++) {
    const uint8_t* row = args.raw + (group * GROUP + i) * args.row_bytes;
    for (int64_t k = 0; k < args.k; k++)
      std::memcpy(to + (k * GROUP + i) * bytes, row + k * bytes, bytes);
  }
}

void pack_group(const PackArgs& args, int64_t group) {
  int64_t bytes = group_bytes(args.format, args.k);
  uint8_t* to = args.tiles + group * bytes;
  std::memset(to, 0, bytes);
  for (int i = 0; i < GROUP; i++) args.factors[group * GROUP + i] = 1.0f;
  if (args.format >= NUM_QUANTISED) return pack_floats(args, group, to);
  int64_t left = args.n - group * GROUP;
  for (int i = 0; i < GROUP && i < left; i++) {
    const uint8_t* row = args.raw + (group * GROUP + i) * args.row_bytes;
    float factor = factor_of(LAYOUTS[args.source], args.source, row, args.k);
    args.factors[group * GROUP + i] = factor;
    Values v;
    for (int64_t b = 0; b < blocks_of(args.k); b++) {
      values_of(args.source, args.format, row, args.k, b, v);
      place(args.format, v, i, factor, to + b * FORMATS[args.format].tile_bytes());
    }
  }
}

int64_t pack_units(const void* a, const Sizes&) { return groups_of(((const PackArgs*)a)->n); }
int64_t one(const void*, const Sizes&) { return 1; }
void pack_run(const void* a, const Sizes&, int64_t begin, int64_t end, Worker&) {
  for (int64_t g = begin; g < end; g++) pack_group(*(const PackArgs*)a, g);
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

void read_row(int32_t source, const uint8_t* row, int64_t k, float* out) {
  if (source <= S_BF16) {
    for (int64_t i = 0; i < k; i++) out[i] = float_at(source, row, i);
    return;
  }
  const Format& f = FORMATS[LAYOUTS[source].format];
  Values v;
  for (int64_t b = 0; b < blocks_of(k); b++) {
    read(source, row, b, v);
    for (int l = 0; l < BLOCK; l++)
      out[b * BLOCK + l] =
          v.scale[l / 16] * (float)((f.has_levels ? E2M1[v.q[l]] : v.q[l]) - f.offset) +
          v.minimum[l / 16];
  }
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
// or W4_MIN for floats. tiles: [bn_linear_bytes(format, n, k)]; factors: [n up to a multiple of 16].
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
