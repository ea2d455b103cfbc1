// Number types of cached keys and values, and their writing, for one instruction set. Included by
// attention.inl.
namespace banyan {
namespace {

// Number types of the cache. BESIDE: elements of a (token, head) in a page beside its numbers.
struct Float32 {
  using type = float;
  static constexpr int BESIDE = 0;
  static vf get(const float* p) { return load(p); }
  static void put(float* p, vf v) { store(p, v); }
  static float narrow(float x) { return x; }
};
struct Float16 {
  using type = uint16_t;
  static constexpr int BESIDE = 0;
  static vf get(const uint16_t* p) { return load_fp16(p); }
  static void put(uint16_t* p, vf v) { store_fp16(p, v); }
  static uint16_t narrow(float x) { return to_fp16(x); }
};
struct Bfloat16 {
  using type = uint16_t;
  static constexpr int BESIDE = 0;
  static vf get(const uint16_t* p) { return load_bf16(p); }
  static void put(uint16_t* p, vf v) { store_bf16(p, v); }
  static uint16_t narrow(float x) { return to_bf16(x); }
};
struct Int8 {
  using type = int8_t;
  static constexpr int BESIDE = sizeof(float);
  static vf get(const int8_t* p) { return load_int8(p); }
};
// Floats of 8 bits with EXPONENT bits of exponent. What is finite and too large becomes the largest
// number, what is not finite becomes no number. Widening moves the bits to their place in fp32 and
// multiplies by the difference of the biases, which is right for subnormal numbers too.
template <int EXPONENT>
struct Float8 {
  using type = uint8_t;
  static constexpr int BESIDE = 0;
  static constexpr bool IS_E4M3 = EXPONENT == 4;
  static constexpr int SHIFT = IS_E4M3 ? 20 : 21, BIAS = IS_E4M3 ? 7 : 15;
  static vf get(const uint8_t* p) {
    vi b = load_bytes_wide(p), magnitude = b & splat_i(0x7f);
    vf v = (vf)(magnitude << SHIFT) * splat(IS_E4M3 ? 0x1p120f : 0x1p112f);
    vi odd = magnitude >= splat_i(IS_E4M3 ? 0x7f : 0x7c);
    vi bits = ((vi)v & ~odd) | ((splat_i(0x7f800000) | (magnitude << SHIFT)) & odd);
    return (vf)(bits | (b & splat_i(INT32_MIN)));
  }
  static vi codes(vf v) {
    vi bits = (vi)v, magnitude = bits & splat_i(INT32_MAX);
    vi sign = bits >> 24 & splat_i(0x80), odd = magnitude >= splat_i(0x7f800000);
    vf x = min((vf)magnitude, splat(IS_E4M3 ? 448.0f : 57344.0f));
    vi even = (vi)x >> SHIFT & splat_i(1);
    vi normal = (((vi)x + splat_i((1 << (SHIFT - 1)) - 1) + even) >> SHIFT) -
                splat_i((127 - BIAS) << (23 - SHIFT));
    vi small = round_to_int(x * splat(IS_E4M3 ? 0x1p9f : 0x1p16f));
    vi is_small = x < splat(IS_E4M3 ? 0x1p-6f : 0x1p-14f);
    vi code = (small & is_small) | (normal & ~is_small);
    return (code & ~odd) | (splat_i(0x7f) & odd) | sign;
  }
};

// One head of one token: numbers `step` elements apart. scale: where its scale goes, if it has one.
// factor: what numbers of 8 bits are multiplied by before.
template <class C>
void put_head(const float* x, int dim, typename C::type* to, int64_t step, void*, float factor) {
  if constexpr (sizeof(typename C::type) == 1)
    for (int d = 0; d < dim; d += LANES) {
      vi codes = C::codes(load(x + d) * splat(factor));
      for (int i = 0; i < LANES; i++) to[(d + i) * step] = (typename C::type)codes[i];
    }
  else if (step == 1)
    for (int d = 0; d < dim; d += LANES) C::put(to + d, load(x + d));
  else
    for (int d = 0; d < dim; d++) to[d * step] = C::narrow(x[d]);
}
// The same bits in every instruction set. A head that is not finite gets a scale that is no number;
// below 2^-100 it counts as zero: 127 / most must stay finite.
template <>
void put_head<Int8>(const float* x, int dim, int8_t* to, int64_t step, void* scale, float) {
  vi magnitudes{};  // the order of magnitudes is that of their bits, with NaN the largest
  for (int d = 0; d < dim; d += LANES) {
    vi bits = (vi)load(x + d) & splat_i(0x7fffffff);
    magnitudes = (vi)choose(bits > magnitudes, (vf)bits, (vf)magnitudes);
  }
  int32_t top = 0;
  for (int i = 0; i < LANES; i++) top = magnitudes[i] > top ? magnitudes[i] : top;
  float most, factor = 0.0f, unit = 0.0f;
  std::memcpy(&most, &top, sizeof most);
  if (top >= 0x7f800000)
    unit = NAN;
  else if (top >= 27 << 23)
    unit = most / 127.0f, factor = 127.0f / most;
  std::memcpy(scale, &unit, sizeof unit);
  for (int d = 0; d < dim; d += LANES) {
    vi rounded = round_to_int(load(x + d) * splat(factor));
    for (int i = 0; i < LANES; i++) to[(d + i) * step] = (int8_t)rounded[i];
  }
}

template <class C>
void write(const void* args, const Sizes&, int64_t begin, int64_t end, Worker&) {
  using T = typename C::type;
  const WriteArgs& a = *(const WriteArgs*)args;
  for (int64_t token = begin; token < end; token++) {
    int64_t page = a.locations[token] / a.page_size, offset = a.locations[token] % a.page_size;
    for (int head = 0; head < a.kv_heads; head++) {
      int64_t at = (page * a.kv_heads + head) * a.page_size * (a.head_dim + C::BESIDE);
      const float* k = a.k + token * a.k_stride + (int64_t)head * a.head_dim;
      const float* v = a.v + token * a.v_stride + (int64_t)head * a.head_dim;
      int64_t scale = a.page_size * a.head_dim + offset * C::BESIDE;
      T *k_page = (T*)a.k_pages + at, *v_page = (T*)a.v_pages + at;
      put_head<C>(k, a.head_dim, k_page + offset, a.page_size, k_page + scale, a.factor);
      put_head<C>(v, a.head_dim, v_page + offset * a.head_dim, 1, v_page + scale, a.factor);
    }
  }
}
int64_t write_units(const void*, const Sizes&) { return 0; }  // row-wise: dealt out by tokens
int64_t write_grain(const void* args, const Sizes&) {
  const WriteArgs& a = *(const WriteArgs*)args;
  int64_t tokens = 2048 / ((int64_t)a.kv_heads * a.head_dim);
  return tokens ? tokens : 1;
}
template <class C>
void write_cost(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const WriteArgs& a = *(const WriteArgs*)args;
  double stored = (double)(a.head_dim + C::BESIDE) * sizeof(typename C::type);
  *bytes = 2.0 * sizes.n[TOKENS] * a.kv_heads * (a.head_dim * 4 + stored);
  *operations = 0;
}

template <class C>
constexpr Kernel write_kernel() {
  return {"write_kv", write_units, write_grain, write<C>, write_cost<C>};
}

}  // namespace
}  // namespace banyan
