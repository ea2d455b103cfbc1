// Builders of the linear family: which kernels, how the work is cut, and the check at load time.
#include "linear.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

namespace banyan {

bool multiplies_pairs(int32_t level) { return level >= VNNI && has_bf16_products(); }

const LinearKernels& linear_table(int32_t level) {
#ifdef BN_LINEAR_AMX
  if (level >= AMX) return linear_amx;
#endif
#ifdef BN_LINEAR_VNNI
  if (level >= VNNI) return linear_vnni;
#endif
#ifdef BN_LINEAR_AVX2
  if (level >= AVX2) return linear_avx2;
#endif
  (void)level;
  return linear_base;
}

namespace {

constexpr int64_t TRIED_ROWS = 24;

// The least time of a few that groups take together, or one after the other.
int64_t fastest_ns(const LinearKernels& table, bool together, LinearArgs args, uint8_t* scratch) {
  int64_t least = INT64_MAX;
  for (int trial = 0; trial < 8; trial++) {
    timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int64_t g = 0; g < table.at_once; g += together ? table.at_once : 1)
      (together ? table.several : table.rounded)[args.format](args, g, 0, TRIED_ROWS, scratch);
    clock_gettime(CLOCK_MONOTONIC, &to);
    int64_t took = (to.tv_sec - from.tv_sec) * 1000000000ll + to.tv_nsec - from.tv_nsec;
    if (took < least) least = took;
  }
  return least;
}

// Whether several groups together are faster here, by more than a busy neighbour makes. That depends on
// how many products a core begins in a cycle, which no flag of a processor tells; as both give the
// same bits, it is tried: 0.2 ms.
bool together_is_faster(const LinearKernels& table) {
  constexpr int64_t K = 576;
  const int64_t row = activation_bytes(W4_MIN, K), bytes = table.at_once * group_bytes(W4_MIN, K);
  const int64_t n = table.at_once * GROUP;
  std::vector<uint8_t> memory(LINEAR_SCRATCH + bytes + TRIED_ROWS * (row + n * 4) + n * 4 + 64);
  uint8_t* scratch = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
  uint8_t *tiles = scratch + LINEAR_SCRATCH, *x = tiles + bytes;
  float* out = (float*)(x + TRIED_ROWS * row);
  LinearArgs args{W4_MIN, 0, n, K, tiles, out + TRIED_ROWS * n, nullptr, x, row, out, n};
  const int64_t alone = fastest_ns(table, false, args, scratch);
  return fastest_ns(table, true, args, scratch) < alone - alone / 20;
}

// What does several groups together, where that pays for so many rows; or null. That is so in every
// format but the quantised ones.
template <bool EXACT>
LinearUnit together(const LinearKernels& table, int32_t format, int64_t rows) {
  static std::atomic<int32_t> is_tried{-1};
  LinearUnit unit = EXACT ? format < NUM_EXACT ? table.several_exact[format] : nullptr
                          : table.several[format];
  if (!unit || rows < several_from(format)) return nullptr;
  if (EXACT || format >= NUM_QUANTISED) return unit;
  int32_t is_faster = is_tried.load(std::memory_order_relaxed);
  if (is_faster < 0) is_tried = is_faster = together_is_faster(table);
  return is_faster ? unit : nullptr;
}

}  // namespace

int64_t linear_units(const void* a, const Sizes& sizes) {
  const LinearArgs& args = *(const LinearArgs*)a;
  return Cut(sizes.n[args.size]).panels * groups_of(args.n);
}

// Some 3 microseconds, and groups that can go together.
int64_t linear_grain(const void* a, const Sizes& sizes) {
  const LinearArgs& args = *(const LinearArgs*)a;
  int64_t reading = group_bytes(args.format, args.k) / 3;
  Cut cut(sizes.n[args.size]);
  int64_t rows = cut.panels ? cut.begin(1) : 0, working = rows * args.k * GROUP / 48;
  int64_t grain = 10000 / ((reading > working ? reading : working) + 1) + 1;
  const LinearKernels& table = linear_table(isa());
  const bool can =
      together<false>(table, args.format, rows) || together<true>(table, args.format, rows);
  const int64_t at_once = can ? table.at_once : 1;
  return (grain + at_once - 1) / at_once * at_once;
}

template <bool EXACT>
void linear_run(const void* a, const Sizes& sizes, int64_t begin, int64_t end, Worker& worker) {
  const LinearArgs& args = *(const LinearArgs*)a;
  const LinearKernels& table = linear_table(isa());
  LinearUnit unit = EXACT ? table.exact[args.format] : table.rounded[args.format];
  int64_t groups = groups_of(args.n);
  Cut cut(sizes.n[args.size]);
  uint8_t* scratch = worker.scratch(LINEAR_SCRATCH);
  for (int64_t i = begin, count; i < end; i += count) {
    const int64_t panel = i / groups, group = i % groups;
    const int64_t first = cut.begin(panel), last = cut.begin(panel + 1);
    count = table.at_once;
    LinearUnit several = together<EXACT>(table, args.format, last - first);
    if (several && count <= groups - group && count <= end - i) {
      several(args, group, first, last, scratch);
    } else {
      count = 1;
      if (first < last) unit(args, group, first, last, scratch);
    }
  }
}
template void linear_run<false>(const void*, const Sizes&, int64_t, int64_t, Worker&);
template void linear_run<true>(const void*, const Sizes&, int64_t, int64_t, Worker&);

void linear_cost(const void* a, const Sizes& sizes, double* bytes, double* operations) {
  const LinearArgs& args = *(const LinearArgs*)a;
  double rows = (double)sizes.n[args.size];
  *bytes = (double)groups_of(args.n) * group_bytes(args.format, args.k) +
           rows * (double)(args.x_bytes + 4 * args.n);
  *operations = 2.0 * rows * (double)args.n * (double)args.k;
}

const Kernel LINEAR = {"linear", linear_units, linear_grain, linear_run<false>, linear_cost};
const Kernel LINEAR_BF16 = {"linear_bf16", linear_units, linear_grain, linear_run<false>,
                            linear_cost};
const Kernel LINEAR_EXACT = {"linear_exact", linear_units, linear_grain, linear_run<true>,
                             linear_cost};

namespace {

// Several projections, each head's inputs through a weight of its own.
struct HeadLinearArgs {
  LinearArgs of;  // of the first head; n and k are those of a head
  int64_t heads, x_head_bytes;
};

int64_t head_linear_units(const void* a, const Sizes& sizes) {
  const HeadLinearArgs& args = *(const HeadLinearArgs*)a;
  return args.heads * linear_units(&args.of, sizes);
}
int64_t head_linear_grain(const void* a, const Sizes& sizes) {
  return linear_grain(&((const HeadLinearArgs*)a)->of, sizes);
}
void head_linear_run(const void* a, const Sizes& sizes, int64_t begin, int64_t end,
                     Worker& worker) {
  const HeadLinearArgs& args = *(const HeadLinearArgs*)a;
  int64_t groups = groups_of(args.of.n), of_panel = args.heads * groups;
  Cut cut(sizes.n[args.of.size]);
  LinearUnit unit = linear_table(isa()).exact[args.of.format];
  uint8_t* scratch = worker.scratch(LINEAR_SCRATCH);
  for (int64_t i = begin; i < end; i++) {
    int64_t panel = i / of_panel, head = i % of_panel / groups;
    LinearArgs one = args.of;
    one.tiles += head * groups * group_bytes(one.format, one.k);
    one.factors += head * groups * GROUP;
    one.x += head * args.x_head_bytes;
    one.out += head * one.n;
    int64_t first = cut.begin(panel), last = cut.begin(panel + 1);
    if (first < last) unit(one, i % groups, first, last, scratch);
  }
}
void head_linear_cost(const void* a, const Sizes& sizes, double* bytes, double* operations) {
  const HeadLinearArgs& args = *(const HeadLinearArgs*)a;
  double rows = (double)sizes.n[args.of.size], heads = (double)args.heads;
  *bytes = heads * (double)groups_of(args.of.n) * (double)group_bytes(args.of.format, args.of.k) +
           rows * heads * 4.0 * (double)(args.of.k + args.of.n);
  *operations = 2.0 * rows * heads * (double)args.of.n * (double)args.of.k;
}
const Kernel HEAD_LINEAR = {"head_linear", head_linear_units, head_linear_grain, head_linear_run,
                            head_linear_cost};

struct QuantizeArgs {
  int32_t format, size;
  const float* x;
  int64_t x_stride, k;
  uint8_t* out;
};

int64_t quantize_units(const void* a, const Sizes& sizes) {
  return sizes.n[((const QuantizeArgs*)a)->size];
}
int64_t quantize_grain(const void* a, const Sizes&) {
  return 10000 / (((const QuantizeArgs*)a)->k + 1) + 1;
}
void quantize_run(const void* a, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  const QuantizeArgs& args = *(const QuantizeArgs*)a;
  const LinearKernels& table = linear_table(isa());
  uint8_t* scratch = worker.scratch(quantize_scratch(args.k));
  for (int64_t i = begin; i < end; i++)
    table.round(args.format, args.x + i * args.x_stride, args.k,
                args.out + i * activation_bytes(args.format, args.k), scratch);
}
void quantize_cost(const void* a, const Sizes& sizes, double* bytes, double* operations) {
  const QuantizeArgs& args = *(const QuantizeArgs*)a;
  double rows = (double)sizes.n[args.size];
  *bytes = rows * (double)(4 * args.k + activation_bytes(args.format, args.k));
  *operations = rows * 4 * (double)args.k;
}
const Kernel QUANTIZE = {"quantize", quantize_units, quantize_grain, quantize_run, quantize_cost};

// Random numbers and small data for the check.
struct Check {
  static constexpr int64_t N = 68, K = 640, M = 34;
  uint64_t state = 88172645463325252ull;
  std::vector<float> x, want, got, factors;
  std::vector<uint8_t> tiles, rows, other, scratch;

  uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
  }
  void fill() {
    x.resize(M * K);
    for (float& v : x) v = (float)(int32_t)next() * 1e-9f;
    factors.assign(groups_of(N) * GROUP, 0.5f);
    want.assign(M * N, 0);
    got.assign(M * N, 0);
    rows.assign(M * std::max(activation_bytes(W8, K), activation_bytes(BF16_PAIRS, K)) + 64, 0);
    other = rows;
    scratch.assign(LINEAR_SCRATCH + 64, 0);
  }
  static uint8_t* aligned(std::vector<uint8_t>& v) {
    return v.data() + (64 - (uintptr_t)v.data() % 64) % 64;
  }
  void weights(int32_t format) {
    int64_t bytes = groups_of(N) * group_bytes(format, K);
    tiles.resize(bytes + 64 + 8192);
    uint8_t* to = aligned(tiles);
    for (int64_t i = 0; i < bytes; i++) to[i] = (uint8_t)next();
    auto number = [&](int64_t at) {  // between 2^-7 and 1
      uint16_t v = (uint16_t)(0x2000 + next() % 0x1c00 + (next() & 0x8000));
      std::memcpy(to + at, &v, 2);
    };
    if (format == E4M3) {  // scales alike, and no number that is none
      for (int64_t at = 0; at < bytes; at++)
        if ((to[at] & 0x7f) == 0x7f) to[at] ^= 1;
      for (int64_t at = 0; at < bytes; at += E4M3_TILE)
        for (int i = 0; i < GROUP; i++) to[at + i * 4 + 3] = 0x3e;
      return;
    }
    if (format >= NUM_QUANTISED) {
      for (int64_t i = 0; i < bytes && format == F16; i += 2) number(i);
      for (int64_t i = 0; i < bytes && format != F16; i += format == F32 ? 4 : 2)
        to[i + (format == F32 ? 3 : 1)] = 0x3e;
      return;
    }
    Format f = FORMATS[format];
    for (int64_t at = 0; at < bytes; at += f.tile_bytes())
      for (int i = 0; i < f.low_at(); i += 2) number(at + i);
  }
  bool close() const {
    double size = 0, error = 0;
    for (size_t i = 0; i < want.size(); i++) {
      size += (double)want[i] * want[i];
      error += ((double)want[i] - got[i]) * ((double)want[i] - got[i]);
    }
    return error <= 1e-10 * size;  // a NaN fails
  }
  // The results of one kernel on `count` rows against the plain one, for the first group and the last.
  bool agree(LinearUnit plain, LinearUnit asked, LinearArgs args, int64_t count) {
    for (int64_t g = 0; g < groups_of(N); g += groups_of(N) - 1) {
      args.out = want.data();
      for (int64_t i = 0; i < count; i++) plain(args, g, i, i + 1, aligned(scratch));
      args.out = got.data();
      asked(args, g, 0, count, aligned(scratch));
    }
    return close();
  }
  // Several groups at once against one after the other, and `rows` after `rows`: the same bits.
  bool agree_at_once(LinearUnit one, LinearUnit several, int64_t at_once, LinearArgs args,
                     int64_t count, int64_t rows) {
    if (!several) return true;
    args.out = want.data();
    for (int64_t g = 0; g < at_once; g++)
      for (int64_t i = 0; i < count; i += rows) one(args, g, i, i + rows, aligned(scratch));
    args.out = got.data();
    several(args, 0, 0, count, aligned(scratch));
    for (int64_t i = 0; i < count * N; i += N)
      if (std::memcmp(&want[i], &got[i], sizeof(float) * GROUP * at_once)) return false;
    return true;
  }
};

}  // namespace
}  // namespace banyan

using namespace banyan;

// Whether there are products with weights of BF16_PAIRS, whose activations are rounded to bf16.
BN_EXPORT int bn_multiplies_pairs() { return multiplies_pairs(isa()); }

// Bytes of a packed weight [n, k], and of one row of activations as its products take it.
BN_EXPORT int64_t bn_linear_bytes(int32_t format, int64_t n, int64_t k) {
  return groups_of(n) * group_bytes(format, k);
}
BN_EXPORT int64_t bn_quantize_bytes(int32_t format, int64_t k) {
  return activation_bytes(format, k);
}

// Rows for products with weights of a format: in 8 bits, or in bf16 for BF16_PAIRS.
// x: [size, k] fp32, rows x_stride apart; out: [size, bn_quantize_bytes(format, k)].
BN_EXPORT void bn_quantize(Program* program, int32_t size, int32_t format, const float* x,
                           int64_t x_stride, int64_t k, uint8_t* out) {
  QuantizeArgs args{format, size, x, x_stride, k, out};
  append(program, QUANTIZE, &args, sizeof args, size);
}

// out = x * transposed(weight) + bias. x: as bn_quantize leaves it for the format;
// factors: [n, up to the next multiple of 16]; bias: [n] or null; out: [size, n], rows out_stride
// apart.
BN_EXPORT void bn_linear(Program* program, int32_t size, int32_t format, int64_t n, int64_t k,
                         const uint8_t* tiles, const float* factors, const float* bias,
                         const uint8_t* x, float* out, int64_t out_stride) {
  LinearArgs args{format, size, n, k, tiles, factors, bias, x,
                  activation_bytes(format, k), out, out_stride};
  append(program, format == BF16_PAIRS ? LINEAR_BF16 : LINEAR, &args, sizeof args, NOT_ROW_WISE);
}

// The same on fp32 activations, which are not rounded. x: [size, k], rows x_stride apart.
BN_EXPORT void bn_linear_exact(Program* program, int32_t size, int32_t format, int64_t n, int64_t k,
                               const uint8_t* tiles, const float* factors, const float* bias,
                               const float* x, int64_t x_stride, float* out, int64_t out_stride) {
  LinearArgs args{format, size, n, k, tiles, factors, bias, (const uint8_t*)x, x_stride * 4, out,
                  out_stride};
  append(program, LINEAR_EXACT, &args, sizeof args, NOT_ROW_WISE);
}

// Each head's inputs through a weight of its own, in fp32. x: [size, heads, k], tokens x_stride and
// heads head_stride apart; tiles, factors: of the heads one after another; out: [size, heads, n].
BN_EXPORT void bn_head_linear(Program* program, int32_t size, int32_t format, int64_t heads,
                              int64_t n, int64_t k, const uint8_t* tiles, const float* factors,
                              const float* x, int64_t x_stride, int64_t head_stride, float* out) {
  LinearArgs of{format, size, n, k, tiles, factors, nullptr, (const uint8_t*)x, x_stride * 4, out,
                heads * n};
  HeadLinearArgs args{of, heads, head_stride * 4};
  append(program, HEAD_LINEAR, &args, sizeof args, NOT_ROW_WISE);
}

// Compare an instruction set with the plain code; 0 = good.
BN_EXPORT int bn_check_linear(int32_t isa, char* why, int32_t room) {
  const LinearKernels& asked = linear_table(isa);
  Check check;
  check.fill();
  uint8_t *rows = Check::aligned(check.rows), *other = Check::aligned(check.other);
  for (int32_t format = 0; format < NUM_FORMATS; format++) {
    const bool is_exact = format < NUM_EXACT;
    const bool is_pairs = format == BF16_PAIRS, is_rounded = format < NUM_QUANTISED || is_pairs;
    if (is_pairs && !multiplies_pairs(isa)) continue;
    const int64_t k = is_pairs ? Check::K - 9 : Check::K;  // of pairs no whole block
    const int64_t bytes = activation_bytes(format, k);
    for (int64_t i = 0; i < Check::M && (format == 0 || is_pairs); i++) {
      const float* x = check.x.data() + i * Check::K;
      uint8_t* scratch = Check::aligned(check.scratch);
      linear_base.round(format, x, k, rows + i * bytes, scratch);
      asked.round(format, x, k, other + i * bytes, scratch);
    }
    if (std::memcmp(rows, other, Check::M * bytes)) {
      std::snprintf(why, room, "format %d: rounded activations differ", format);
      return 1;
    }
    check.weights(format);
    LinearArgs args{format, 0, Check::N, k, Check::aligned(check.tiles),
                    check.factors.data(), nullptr, rows, bytes, nullptr, Check::N};
    for (int64_t count : {(int64_t)1, Check::M}) {
      if (is_rounded &&
          !check.agree(linear_base.rounded[format], asked.rounded[format], args, count)) {
        std::snprintf(why, room, "format %d, %d rows: results differ", format, (int)count);
        return 1;
      }
    }
    for (int64_t count : {(int64_t)1, (int64_t)2, (int64_t)7, Check::M})
      if (is_rounded && !check.agree_at_once(asked.rounded[format], asked.several[format],
                                             asked.at_once, args, count, is_pairs ? 1 : count)) {
        std::snprintf(why, room, "format %d, %d rows: groups at once differ", format, (int)count);
        return 1;
      }
    args.x = (const uint8_t*)check.x.data();
    args.x_bytes = Check::K * 4;
    for (int64_t count : {(int64_t)1, (int64_t)9})
      if (is_exact && !check.agree(linear_base.exact[format], asked.exact[format], args, count)) {
        std::snprintf(why, room, "format %d on fp32, %d rows: results differ", format, (int)count);
        return 1;
      }
    for (int64_t count : {(int64_t)7, Check::M})
      if (is_exact && !check.agree_at_once(asked.exact[format], asked.several_exact[format],
                                           asked.at_once, args, count, count)) {
        std::snprintf(why, room, "format %d on fp32, %d rows: groups at once differ", format,
                      (int)count);
        return 1;
      }
  }
  return 0;
}
