// Low-rank adapters for one instruction set. Included by adapters_<set>.cpp, which names
// ADAPTERS_TABLE.
//
// A piece is some tokens of one adapter, so each matrix is read once for all of them. Every number
// has one order of additions, from the first input or rank to the last, whatever is beside it: a
// token's result depends on that token alone.
#include <algorithm>

#include "adapters.h"
#include "vec.h"

namespace banyan {
namespace {

constexpr int ROWS = 8;      // rows of `down` that one unit multiplies with
constexpr int VECTORS = 4;   // of outputs that are added up side by side
constexpr int64_t OUTPUTS_AT_ONCE = 256;  // outputs of one unit

struct Fp32 {
  typedef float type;
  static vf get(const float* p) { return load(p); }
  static vf get_some(const float* p, int n) { return load_some(p, n); }
};
struct Bf16 {
  typedef uint16_t type;
  static vf get(const uint16_t* p) { return load_bf16(p); }
  static vf get_some(const uint16_t* p, int n) {
    uint16_t padded[LANES] = {};
    std::memcpy(padded, p, sizeof(uint16_t) * n);
    return load_bf16(padded);
  }
};
struct Fp16 {
  typedef uint16_t type;
  static vf get(const uint16_t* p) { return load_fp16(p); }
  static vf get_some(const uint16_t* p, int n) {
    uint16_t padded[LANES] = {};
    std::memcpy(padded, p, sizeof(uint16_t) * n);
    return load_fp16(padded);
  }
};

struct Piece {
  int32_t adapter, first, count;
};
const Piece* pieces_of(const AdapterArgs& a) { return (const Piece*)(a.pieces + 1); }
// A run without tokens makes logits of the one before: what its tokens were counts no more.
int32_t num_pieces(const AdapterArgs& a, const Sizes& sizes) {
  return sizes.n[TOKENS] ? a.pieces[0] : 0;
}

int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

int64_t shrink_units_of(const AdapterPair& pair) { return blocks(pair.rank, ROWS); }
int64_t expand_units_of(const AdapterPair& pair) {
  int64_t units = 0;
  for (const AdapterPair::Part& part : pair.parts)
    if (part.rank) units += blocks(part.outputs, OUTPUTS_AT_ONCE);
  return units;
}

template <int64_t (*OF)(const AdapterPair&)>
int64_t units(const void* args, const Sizes& sizes) {
  const AdapterArgs& a = *(const AdapterArgs*)args;
  int64_t found = 0;
  for (int32_t i = 0; i < num_pieces(a, sizes); i++) found += OF(a.table[pieces_of(a)[i].adapter]);
  return found;
}
int64_t grain(const void*, const Sizes&) { return 1; }

// f(piece, pair, unit within the piece) of the units begin ... end - 1.
template <int64_t (*OF)(const AdapterPair&), class F>
void each_unit(const AdapterArgs& a, int64_t begin, int64_t end, F f) {
  int64_t at = 0;
  for (const Piece* piece = pieces_of(a); at < end; piece++) {
    const AdapterPair& pair = a.table[piece->adapter];
    int64_t here = OF(pair);
    for (int64_t i = std::max(begin - at, (int64_t)0); i < std::min(end - at, here); i++)
      f(*piece, pair, i);
    at += here;
  }
}

template <class T>
void shrink_piece(const AdapterArgs& a, const Piece& piece, const AdapterPair& pair, int64_t unit) {
  int64_t first = unit * ROWS, rows = std::min((int64_t)ROWS, pair.rank - first);
  const typename T::type* down = (const typename T::type*)pair.down + first * a.inputs;
  for (int32_t place = piece.first; place < piece.first + piece.count; place++) {
    const float* x = a.x + a.order[place] * a.x_stride;
    float* inner = a.inner + place * a.width + first;
    vf sums[ROWS] = {};
    int64_t i = 0;
    if (rows == ROWS)
      for (; i + LANES <= a.inputs; i += LANES) {
        vf v = load(x + i);
        for (int r = 0; r < ROWS; r++) sums[r] = fma(T::get(down + r * a.inputs + i), v, sums[r]);
      }
    else
      for (; i + LANES <= a.inputs; i += LANES) {
        vf v = load(x + i);
        for (int r = 0; r < rows; r++) sums[r] = fma(T::get(down + r * a.inputs + i), v, sums[r]);
      }
    if (int rest = (int)(a.inputs - i)) {
      vf v = load_some(x + i, rest);
      for (int r = 0; r < rows; r++)
        sums[r] = fma(T::get_some(down + r * a.inputs + i, rest), v, sums[r]);
    }
    for (int r = 0; r < rows; r++) inner[r] = sum(sums[r]) * pair.scales[first + r];
  }
}

template <class T>
void expand_token(const float* inner, const typename T::type* up, int64_t rank, int64_t outputs,
                  int64_t begin, int64_t end, float* out) {
  int64_t o = begin;
  for (; o + VECTORS * LANES <= end; o += VECTORS * LANES) {
    vf sums[VECTORS] = {};
    for (int64_t r = 0; r < rank; r++) {
      vf h = splat(inner[r]);
      for (int v = 0; v < VECTORS; v++)
        sums[v] = fma(h, T::get(up + r * outputs + o + v * LANES), sums[v]);
    }
    for (int v = 0; v < VECTORS; v++)
      store(out + o + v * LANES, load(out + o + v * LANES) + sums[v]);
  }
  for (; o < end; o += LANES) {
    int lanes = (int)std::min((int64_t)LANES, end - o);
    vf total{};
    for (int64_t r = 0; r < rank; r++)
      total = fma(splat(inner[r]), T::get_some(up + r * outputs + o, lanes), total);
    store_some(out + o, load_some(out + o, lanes) + total, lanes);
  }
}

template <class T>
void expand_piece(const AdapterArgs& a, const Piece& piece, const AdapterPair& pair, int64_t unit) {
  const typename T::type* up = (const typename T::type*)pair.up;
  for (const AdapterPair::Part& part : pair.parts) {
    if (!part.rank) continue;
    int64_t here = blocks(part.outputs, OUTPUTS_AT_ONCE);
    if (unit >= here) {
      unit -= here;
      up += part.rank * part.outputs;
      continue;
    }
    int64_t begin = unit * OUTPUTS_AT_ONCE, end = std::min(begin + OUTPUTS_AT_ONCE, part.outputs);
    for (int32_t place = piece.first; place < piece.first + piece.count; place++)
      expand_token<T>(a.inner + place * a.width + part.first_rank, up, part.rank, part.outputs,
                      begin, end, a.out + a.order[place] * a.out_stride + part.first_output);
    return;
  }
}

void shrink(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const AdapterArgs& a = *(const AdapterArgs*)args;
  each_unit<shrink_units_of>(a, begin, end, [&](const Piece& p, const AdapterPair& pair, int64_t i) {
    if (pair.type == ADAPTER_BF16) return shrink_piece<Bf16>(a, p, pair, i);
    if (pair.type == ADAPTER_FP16) return shrink_piece<Fp16>(a, p, pair, i);
    shrink_piece<Fp32>(a, p, pair, i);
  });
}

void expand(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  const AdapterArgs& a = *(const AdapterArgs*)args;
  each_unit<expand_units_of>(a, begin, end, [&](const Piece& p, const AdapterPair& pair, int64_t i) {
    if (pair.type == ADAPTER_BF16) return expand_piece<Bf16>(a, p, pair, i);
    if (pair.type == ADAPTER_FP16) return expand_piece<Fp16>(a, p, pair, i);
    expand_piece<Fp32>(a, p, pair, i);
  });
}

template <bool IS_DOWN>
void cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const AdapterArgs& a = *(const AdapterArgs*)args;
  *bytes = *operations = 0;
  for (int32_t i = 0; i < num_pieces(a, sizes); i++) {
    const Piece& piece = pieces_of(a)[i];
    const AdapterPair& pair = a.table[piece.adapter];
    double weights = IS_DOWN ? (double)pair.rank * (double)a.inputs : 0;
    for (const AdapterPair::Part& part : pair.parts)
      if (!IS_DOWN) weights += (double)part.rank * (double)part.outputs;
    *bytes += weights * (pair.type == ADAPTER_FP32 ? 4 : 2);
    *operations += 2 * weights * piece.count;
  }
}

}  // namespace

extern const AdapterKernels ADAPTERS_TABLE = {
    {"adapter_down", units<shrink_units_of>, grain, shrink, cost<true>},
    {"adapter_up", units<expand_units_of>, grain, expand, cost<false>},
};

}  // namespace banyan
