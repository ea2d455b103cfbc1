// Projections: how weights and activations lie in memory, and what an instruction set provides.
//
// Weights are cut into tiles of 16 outputs x 32 inputs (one block). The tiles of 16 outputs follow
// each other along the inputs, such groups follow each other along the outputs: who works on a range
// of groups reads one stream. One layout serves all instruction sets:
//
//   scales   fp16 [parts][16]     one part per 32 inputs, or two of 16
//   minima   fp16 [parts][16]     if the format has them
//   low      4 bits: 4 x 64 bytes; vector z holds inputs 8z ... 8z+3 in its low halves of bytes and
//            8z+4 ... 8z+7 in its high ones. 8 bits: 8 x 64 bytes, vector g holds 4g ... 4g+3.
//            Inside a vector: 16 outputs x 4 inputs, which is what vpdpbusd takes.
//   high     5 bits: 64 bytes, bit g of byte i tops up byte i of vector g.
//            6 bits: 2 x 64 bytes, bits 2g, 2g+1 of byte i of vector h top up vector 4h+g.
//
// A weight is factor * (scale * (q - offset) + minimum), the factor fp32 and per output; where 4 bits
// number levels, q is the level.
// Float weights lie as [group][input][16 outputs]; those of 8 bits (E4M3) in tiles of 32 inputs: scales
// fp32 [16], which are 2^8 times those of the checkpoint, and the numbers as `load_e4m3` takes them,
// [four inputs][four outputs][two inputs][output][input]. bf16 whose activations are rounded lies as
// [group][pair of inputs][16 outputs][2], with a zero behind an odd last input: 64 bytes are what
// vdpbf16ps takes.
//
// Quantised activations, per row: values s8 [32 * blocks], scales fp32 [blocks], scaled sums fp32
// [blocks] (scale * sum of the block), sums s16 [blocks][2] (of the halves of the block), and what is
// kept apart: values fp32 [apart], their inputs s32 [apart]. The largest magnitudes of a row are kept
// apart as they are and count as zero among the values: a few large inputs would otherwise set the
// scale of their blocks, and most of the rounding error with it.
// For pairs of bf16 a row is bf16 [inputs], with zeros behind the last up to 32, and an odd number of
// lines of the cache, so that what 16 rows have of a block does not meet in one place of it.
#pragma once
#include <cstddef>

#include "runtime.h"

namespace banyan {

constexpr int GROUP = 16;  // outputs of a tile
constexpr int BLOCK = 32;  // inputs of a tile

enum FormatId : int32_t {
  W4 = 0,             // Q4_0
  W4_MIN = 1,         // Q4_1, Q4_K
  W4_HALVES = 2,      // Q3_K
  W4_MIN_HALVES = 3,  // Q2_K
  W5 = 4,             // Q5_0
  W5_MIN = 5,         // Q5_1, Q5_K
  W6_HALVES = 6,      // Q6_K
  W8 = 7,             // Q8_0
  W4_E2M1 = 8,        // MXFP4
  W4_IQ4 = 9,         // IQ4_NL, IQ4_XS
  W4_IQ3 = 10,        // IQ3_XXS
  W4_IQ2_HALVES = 11,  // IQ2_XXS, IQ2_XS, IQ2_S
  NUM_QUANTISED = 12,
  F32 = 12,
  F16 = 13,
  BF16 = 14,
  E4M3 = 15,
  NUM_EXACT = 16,  // those before are multiplied with fp32 activations too
  BF16_PAIRS = 16,
  NUM_FORMATS = 17,
};

// What 4 bits stand for where they are no numbers, + the offset of the format.
struct alignas(16) Levels {
  uint8_t q[16];
};
// Twice the 4-bit floats with two bits of exponent and one of mantissa.
constexpr Levels E2M1{{12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}};
constexpr Levels IQ4{{1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}};
// A magnitude, halved, and a bit for its sign above it.
constexpr Levels IQ3{{34, 38, 42, 46, 50, 54, 58, 63, 30, 26, 22, 18, 14, 10, 6, 1}};
constexpr Levels IQ2{{51, 68, 86, 43, 35, 18, 0, 43}};

struct Format {
  int bits, offset;
  bool has_min, has_halves;
  const Levels* levels = nullptr;  // of 4 bits that are the number of one

  constexpr int number(int q) const { return levels ? levels->q[q] : q; }
  constexpr int width() const {  // bits of the largest number
    int most = 1 << bits, n = 0;
    if (levels) most = 1;
    for (int i = 0; levels && i < 16; i++) most = number(i) >= most ? number(i) + 1 : most;
    while (1 << n < most) n++;
    return n;
  }
  constexpr int parts() const { return has_halves ? 2 : 1; }
  constexpr int scale_bytes() const { return parts() * GROUP * 2; }
  constexpr int low_at() const { return scale_bytes() * (has_min ? 2 : 1); }
  constexpr int high_at() const { return low_at() + (bits == 8 ? 512 : 256); }
  constexpr int tile_bytes() const { return high_at() + (bits == 5 ? 64 : bits == 6 ? 128 : 0); }
};
constexpr Format FORMATS[NUM_QUANTISED] = {
    {4, 8, false, false}, {4, 0, true, false}, {4, 4, false, true},  {4, 0, true, true},
    {5, 16, false, false}, {5, 0, true, false}, {6, 32, false, true}, {8, 128, false, false},
    {4, 12, false, false, &E2M1}, {4, 128, false, false, &IQ4}, {4, 32, false, false, &IQ3},
    {4, 43, false, true, &IQ2},
};

constexpr int64_t blocks_of(int64_t k) { return (k + BLOCK - 1) / BLOCK; }
constexpr int64_t groups_of(int64_t n) { return (n + GROUP - 1) / GROUP; }

// One input of so many blocks is kept apart, and one at least; 0, as benchmarks/rounding.py builds it
// to compare: none.
#ifndef BN_BLOCKS_PER_APART
#define BN_BLOCKS_PER_APART 16
#endif
constexpr int64_t apart_of(int64_t blocks) {
#if BN_BLOCKS_PER_APART
  return blocks < 2 * BN_BLOCKS_PER_APART ? 1 : blocks / BN_BLOCKS_PER_APART;
#else
  return blocks - blocks;
#endif
}
constexpr int64_t pairs_of(int64_t k) { return (k + 1) / 2; }
constexpr int64_t activation_bytes(int32_t format, int64_t k) {
  if (format == BF16_PAIRS) return (blocks_of(k) | 1) * 64;
  const int64_t bytes = blocks_of(k) * 44 + apart_of(blocks_of(k)) * 8;
  return (bytes + 63) / 64 * 64;
}
constexpr int64_t E4M3_TILE = GROUP * 4 + GROUP * BLOCK;
constexpr int e4m3_at(int input, int output) {  // of a tile
  return GROUP * (4 + input / 4 * 4) + output / 4 * 16 + input % 4 / 2 * 8 + output % 4 * 2 + input % 2;
}
constexpr int64_t group_bytes(int32_t format, int64_t k) {
  return format < NUM_QUANTISED ? blocks_of(k) * FORMATS[format].tile_bytes()
         : format == E4M3       ? blocks_of(k) * E4M3_TILE
         : format == BF16_PAIRS ? pairs_of(k) * GROUP * 4
                                : k * GROUP * (format == F32 ? 4 : 2);
}

struct LinearArgs {
  int32_t format, size;
  int64_t n, k;
  const uint8_t* tiles;
  const float* factors;  // [groups * 16]
  const float* bias;     // [n] or null
  const uint8_t* x;      // rows of rounded activations, or of fp32
  int64_t x_bytes;       // from row to row
  float* out;
  int64_t out_stride;
};

// One group of outputs for rows [begin, end), end - begin <= PANEL_ROWS.
typedef void (*LinearUnit)(const LinearArgs& args, int64_t group, int64_t begin, int64_t end,
                           uint8_t* scratch);
constexpr int64_t PANEL_ROWS = 192;
constexpr size_t LINEAR_SCRATCH = 128 << 10;

constexpr size_t quantize_scratch(int64_t k) { return blocks_of(k) * 8; }

// Rows from which several groups together pay: fewer go straight from memory, of floats twelve.
constexpr int64_t several_from(int32_t format) { return format < NUM_QUANTISED ? 9 : 13; }

struct LinearKernels {
  // One row; scratch: quantize_scratch(k).
  void (*quantize)(const float* x, int64_t k, uint8_t* out, uint8_t* scratch);
  void (*round_pairs)(const float* x, int64_t k, uint8_t* out);
  LinearUnit rounded[NUM_FORMATS];  // on rounded activations; null where there is none
  LinearUnit exact[NUM_EXACT];      // on fp32 activations
  // Groups that these do together, with the same results; null where there are none.
  int64_t at_once;
  LinearUnit several[NUM_FORMATS];
  LinearUnit several_exact[NUM_EXACT];

  // One row as products with a format take it.
  void round(int32_t format, const float* x, int64_t k, uint8_t* out, uint8_t* scratch) const {
    format == BF16_PAIRS ? round_pairs(x, k, out) : quantize(x, k, out, scratch);
  }
};
extern const LinearKernels linear_base, linear_avx2, linear_vnni, linear_amx;
const LinearKernels& linear_table(int32_t level);
// Whether those of an instruction set have products with pairs of bf16 on this machine.
bool multiplies_pairs(int32_t level);

// Rows are cut into panels of nearly equal size, which begin at multiples of 24 (a multiple of what
// kernels take at once): equal panels are equal work for the threads.
namespace {
struct Cut {
  int64_t count, panels;

  explicit Cut(int64_t rows) : count(rows), panels((rows + PANEL_ROWS - 1) / PANEL_ROWS) {}
  int64_t begin(int64_t panel) const {
    int64_t row = (panel * count / panels + 23) / 24 * 24;
    return row < count ? row : count;
  }
};

// What a unit of a product is: a group of outputs for some rows.
struct LinearPlan {
  Cut cut;
  int64_t groups;

  LinearPlan(const LinearArgs& args, const Sizes& sizes)
      : cut(sizes.n[args.size]), groups(groups_of(args.n)) {}
  int64_t group(int64_t unit) const { return unit % groups; }
  int64_t first(int64_t unit) const { return cut.begin(unit / groups); }
  int64_t last(int64_t unit) const { return cut.begin(unit / groups + 1); }
};
}  // namespace

// Products on activations in 8 bits, in bf16 and in fp32, as the kernels of a Program; what works beside one
// calls its parts.
extern const Kernel LINEAR, LINEAR_BF16, LINEAR_EXACT;
int64_t linear_units(const void* args, const Sizes& sizes);
int64_t linear_grain(const void* args, const Sizes& sizes);
template <bool EXACT>
void linear_run(const void* args, const Sizes& sizes, int64_t begin, int64_t end, Worker& worker);
void linear_cost(const void* args, const Sizes& sizes, double* bytes, double* operations);

}  // namespace banyan
