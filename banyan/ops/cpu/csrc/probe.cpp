#include "probe.h"

using namespace banyan;

namespace {

struct Args {
  int32_t kind;  // 0 fp32, 1 8 bits, 2 reading, 3 bf16
  int64_t amount;
  const float* data;
  double* done;  // [threads] operations or bytes
};

const ProbeKernels& kernels(int32_t level) {
#ifdef BN_PROBE_AMX
  if (level >= AMX) return probe_amx;
#endif
#ifdef BN_PROBE_VNNI
  if (level >= VNNI) return probe_vnni;
#endif
#ifdef BN_PROBE_AVX512
  if (level >= AVX512) return probe_avx512;
#endif
#ifdef BN_PROBE_AVX2
  if (level >= AVX2) return probe_avx2;
#endif
  (void)level;
  return probe_base;
}

int64_t units(const void*, const Sizes& sizes) { return sizes.n[TOKENS]; }
int64_t grain(const void*, const Sizes&) { return 1; }
void cost(const void*, const Sizes&, double* bytes, double* operations) {
  *bytes = *operations = 0;
}

void run(const void* args, const Sizes& sizes, int64_t begin, int64_t end, Worker&) {
  const Args& a = *(const Args*)args;
  const ProbeKernels& k = kernels(isa());
  for (int64_t i = begin; i < end; i++) {
    if (a.kind == 2) {
      int64_t count = a.amount / sizes.n[TOKENS];
      volatile float sum = k.read_all(a.data + i * count, count);
      (void)sum;
      a.done[i] = 4.0 * (double)count;
    } else {
      a.done[i] = (a.kind == 3 ? k.pair_products : a.kind ? k.small_products : k.products)(a.amount);
    }
  }
}

const Kernel PROBE = {"probe", units, grain, run, cost};

struct Passing {
  int64_t turns, patience;  // patience: looks for one's turn, of some ns each
  int64_t* line;
};

// Threads count up a number one after the other, each when it sees that its turn has come.
void pass_on(const void* args, const Sizes& sizes, int64_t begin, int64_t end, Worker&) {
  const Passing& a = *(const Passing*)args;
  for (int64_t i = begin; i < end; i++)
    for (int64_t turn = 0; turn < a.turns; turn++) {
      const int64_t mine = turn * sizes.n[TOKENS] + i;
      int64_t now = 0;
      for (int64_t looks = 0; (now = __atomic_load_n(a.line, __ATOMIC_ACQUIRE)) != mine; looks++)
        if (now < 0 || looks == a.patience)  // somebody has not come
          return __atomic_store_n(a.line, -1, __ATOMIC_RELEASE);
      __atomic_store_n(a.line, mine + 1, __ATOMIC_RELEASE);
    }
}

const Kernel PASSING = {"passing", units, grain, pass_on, cost};

}  // namespace

// As many pieces as rows of the op. kind: 0 fp32 products, 1 8-bit products, 3 bf16 products
// (amount: rounds), 2 reading `amount` floats of `data`. done: [pieces] operations or bytes.
BN_EXPORT void bn_probe(Program* program, int32_t size, int32_t kind, int64_t amount,
                        const float* data, double* done) {
  (void)size;
  Args args{kind, amount, data, done};
  append(program, PROBE, &args, sizeof args, NOT_ROW_WISE);
}
// A number in one cache line goes around all threads, a row of the op each. line: [1], 0; then how often
// it was passed on, or below 0 where a thread did not come within so many looks.
BN_EXPORT void bn_probe_passing(Program* program, int32_t size, int64_t turns, int64_t patience,
                                int64_t* line) {
  (void)size;
  Passing args{turns, patience, line};
  append(program, PASSING, &args, sizeof args, NOT_ROW_WISE);
}
