// Low-rank adapters: the builder that lets them join a product, or makes ops of their own, and what
// checks their kernels.
#include "lora.h"

#include <cmath>
#include <cstdio>
#include <vector>

#include "program.h"

namespace banyan {

const AdapterKernels& lora_table(int32_t level) {
#ifdef BN_LORA_AVX512
  if (level >= AVX512) return lora_avx512;
#endif
#ifdef BN_LORA_AVX2
  if (level >= AVX2) return lora_avx2;
#endif
  (void)level;
  return lora_base;
}

namespace {

struct Piece {
  int32_t adapter, first, count;
};

int64_t units_of(const AdapterPair& pair) {
  int64_t ranks = pair.type == ADAPTER_TILED ? GROUP : RANKS;
  return (pair.rank + ranks - 1) / ranks;
}

// GROUP rows of `down` with the tokens of a piece, of which those that follow each other are rows of
// one product. Inputs that nobody has rounded are rounded here, to the same numbers.
void shrink_tiles(const AdapterArgs& a, const AdapterPair& pair, const Piece& piece, int64_t group,
                  const LinearArgs* product, Worker& worker) {
  const LinearKernels& table = linear_table(isa());
  const int64_t bytes = activation_bytes(W8, a.inputs);
  uint8_t* scratch = worker.scratch(LINEAR_SCRATCH + bytes + quantize_scratch(a.inputs));
  const int32_t* tokens = a.order + piece.first;
  for (int32_t at = 0, to; at < piece.count; at = to) {
    for (to = at + 1; product && to < piece.count && tokens[to] == tokens[to - 1] + 1;) to++;
    const uint8_t* x = product ? product->x + tokens[at] * product->x_bytes : scratch + LINEAR_SCRATCH;
    if (!product)
      table.quantize(a.x + tokens[at] * a.x_stride, a.inputs, scratch + LINEAR_SCRATCH,
                     scratch + LINEAR_SCRATCH + bytes);
    LinearArgs args{W8, 0, pair.rank, a.inputs, (const uint8_t*)pair.down, pair.scales, nullptr, x,
                    bytes, a.inner + tokens[at] * a.width, a.width};
    table.rounded[W8](args, group, 0, to - at, scratch);
  }
}

}  // namespace

int64_t down_bytes(const AdapterPair& pair, int64_t inputs) {
  if (pair.type == ADAPTER_TILED) return groups_of(pair.rank) * group_bytes(W8, inputs);
  return pair.rank * ((inputs + TILE - 1) / TILE * TILE) * bytes_of(pair.type);
}

int64_t adapter_units(const AdapterArgs& a, int64_t tokens) {
  int64_t units = 0;
  for (int32_t i = 0; tokens && i < a.pieces[0]; i++) units += units_of(a.table[a.pieces[1 + 3 * i]]);
  return units;
}

void shrink_unit(const AdapterArgs& a, int64_t unit, const LinearArgs* product, Worker& worker) {
  for (const Piece* piece = (const Piece*)(a.pieces + 1);; piece++) {
    const AdapterPair& pair = a.table[piece->adapter];
    int64_t here = units_of(pair);
    if (unit >= here) {
      unit -= here;
      continue;
    }
    if (pair.type == ADAPTER_TILED) return shrink_tiles(a, pair, *piece, unit, product, worker);
    const int32_t* tokens = a.order + piece->first;
    return lora_table(isa()).shrink_rows(a, pair, unit, tokens, tokens, piece->count);
  }
}

void adapter_cost(const AdapterArgs& a, int64_t tokens, bool is_down, double* bytes,
                  double* operations) {
  *bytes = *operations = 0;
  for (int32_t i = 0; tokens && i < a.pieces[0]; i++) {
    const int32_t* piece = a.pieces + 1 + 3 * i;
    const AdapterPair& pair = a.table[piece[0]];
    double weights = is_down ? (double)pair.rank * (double)a.inputs : 0;
    for (const AdapterPair::Part& part : pair.parts)
      if (!is_down) weights += (double)(part.rank * part.tiles * TILE);
    *bytes += weights * (double)bytes_of(pair.type);
    *operations += 2 * weights * piece[2];
  }
}

namespace {

constexpr int64_t ROWS_OF_UNIT = 64;  // tokens of one unit of the second product

// Both products by themselves, behind a product of another kind.
struct LoneArgs {
  AdapterArgs of;
  int64_t size;
};
const LoneArgs& lone(const void* args) { return *(const LoneArgs*)args; }
int64_t tokens_of(const void* args, const Sizes& sizes) { return sizes.n[lone(args).size]; }
int64_t row_blocks(int64_t tokens) { return (tokens + ROWS_OF_UNIT - 1) / ROWS_OF_UNIT; }
int64_t tiles_of(const AdapterArgs& a) { return (a.outputs + TILE - 1) / TILE; }

int64_t down_units(const void* args, const Sizes& sizes) {
  return adapter_units(lone(args).of, tokens_of(args, sizes));
}
int64_t down_grain(const void*, const Sizes&) { return 1; }
void down_run(const void* args, const Sizes&, int64_t begin, int64_t end, Worker& worker) {
  for (int64_t i = begin; i < end; i++) shrink_unit(lone(args).of, i, nullptr, worker);
}
void down_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  adapter_cost(lone(args).of, tokens_of(args, sizes), true, bytes, operations);
}

int64_t up_units(const void* args, const Sizes& sizes) {
  const AdapterArgs& a = lone(args).of;
  int64_t tokens = tokens_of(args, sizes);
  return adapter_units(a, tokens) ? row_blocks(tokens) * tiles_of(a) : 0;
}
int64_t up_grain(const void*, const Sizes&) { return 8; }
void up_run(const void* args, const Sizes& sizes, int64_t begin, int64_t end, Worker&) {
  const AdapterArgs& a = lone(args).of;
  int64_t tokens = tokens_of(args, sizes), tiles = tiles_of(a);
  while (begin < end) {
    int64_t first = begin / tiles * ROWS_OF_UNIT, last = first + ROWS_OF_UNIT;
    int64_t tile = begin % tiles, count = end - begin < tiles - tile ? end - begin : tiles - tile;
    lora_table(isa()).expand(a, tile, tile + count, first, last < tokens ? last : tokens);
    begin += count;
  }
}
void up_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  adapter_cost(lone(args).of, tokens_of(args, sizes), false, bytes, operations);
}

const Kernel DOWN = {"adapter_down", down_units, down_grain, down_run, down_cost};
const Kernel UP = {"adapter_up", up_units, up_grain, up_run, up_cost};

constexpr int INPUTS = 37, OUTPUTS_OF = 75, RANK = 15;  // whole tiles and a rest, rows too

// What a table of kernels adds to the outputs of two tokens.
std::vector<float> outcome(const AdapterKernels& kernels) {
  constexpr int IN_TILES = (INPUTS + TILE - 1) / TILE, OUT_TILES = (OUTPUTS_OF + TILE - 1) / TILE;
  std::vector<float> x(2 * INPUTS), down(RANK * IN_TILES * TILE), up(RANK * OUT_TILES * TILE);
  std::vector<float> out(2 * OUTPUTS_OF, 1.0f), scales(RANK, 0.5f), inner(2 * RANK);
  for (size_t i = 0; i < x.size(); i++) x[i] = std::sin(1.7f * (float)i);
  for (size_t i = 0; i < down.size(); i++) down[i] = std::cos(0.9f * (float)i);
  for (size_t i = 0; i < up.size(); i++) up[i] = std::sin(0.3f * (float)i);
  AdapterPair pair{down.data(), up.data(), scales.data(), RANK, ADAPTER_FP32,
                   {{0, OUT_TILES, 0, RANK}}};
  const int32_t pieces[] = {1, 0, 0, 2}, order[] = {0, 1}, numbers[] = {0, 0};
  AdapterArgs args{&pair,      pieces,  order,  numbers,    x.data(), out.data(), inner.data(),
                   nullptr,    INPUTS,  OUTPUTS_OF, INPUTS, OUTPUTS_OF, RANK};
  for (int64_t block = 0; block * RANKS < RANK; block++)
    kernels.shrink_rows(args, pair, block, order, order, 2);
  kernels.expand(args, 0, OUT_TILES, 0, 2);
  return out;
}

}  // namespace
}  // namespace banyan

using namespace banyan;


// Whether an instruction set computes what the plain code does; 1 and the reason when not.
BN_EXPORT int bn_check_lora(int32_t isa, char* why, int32_t room) {
  std::vector<float> expected = outcome(lora_base), found = outcome(lora_table(isa));
  for (size_t i = 0; i < found.size(); i++)
    if (!(std::fabs(found[i] - expected[i]) <= 1e-4f * (1.0f + std::fabs(expected[i])))) {
      std::snprintf(why, room, "adapters give %g for %g", found[i], expected[i]);
      return 1;
    }
  return 0;
}

// Adds to the rows of `out` what the adapters of their tokens make of the rows of `x`.
BN_EXPORT void bn_lora(Program* program, int32_t size, const void* table, const int32_t* pieces,
                           const int32_t* order, const int32_t* numbers, const float* x,
                           int64_t x_stride, float* out, int64_t out_stride, float* inner,
                           void* state, int64_t inputs, int64_t outputs, int64_t width) {
  AdapterArgs of{(const AdapterPair*)table, pieces, order, numbers, x, out, inner,
                 (AdapterState*)state, x_stride, out_stride, inputs, outputs, width};
  if (join_product(program, size, of)) return;
  LoneArgs args{of, size};
  append(program, DOWN, &args, sizeof args, NOT_ROW_WISE);
  append(program, UP, &args, sizeof args, NOT_ROW_WISE);
}
