// What every kernel of the CPU library is built on: instruction sets, threads, and programs.
//
// A *program* is a list of ops with fixed arguments. Building one takes an ordinary call per op;
// running it takes one call for all of them, on all threads, for sizes that are given at run time.
// An op called on its own is a program of one op. Nothing here knows models or Python.
#pragma once
#include <cstddef>
#include <cstdint>

namespace banyan {

// Instruction sets in rising order; a kernel family provides some and uses the best that is not
// above the one the process runs with.
enum Isa : int32_t { BASE = 0, AVX2 = 1, AVX512 = 2, VNNI = 3, AMX = 4, NUM_ISAS = 5 };

// The number of the one that the library is built for. Beside plain code it holds what is best there of
// each family, and BN_LINEAR_VNNI and so on name those; lower ones are in libraries of their own.
#ifndef BN_BUILT_FOR
#define BN_BUILT_FOR 0
#endif

// The numbers that change from step to step. An op names the one its leading dimension has. ALL_*
// counts those of every replica, where several work on one batch.
enum Size : int32_t {
  TOKENS = 0, ROWS = 1, OUTPUTS = 2, ALL_TOKENS = 3, ALL_OUTPUTS = 4, NUM_SIZES = 5
};
struct Sizes {
  int64_t n[NUM_SIZES];
};

struct Pool;
struct Program;

// One thread at work.
struct Worker {
  int32_t index;  // 0 is the thread that called
  int32_t count;
  // Set by an op that could not do its work: why. The run then fails as a whole.
  const char* failure = nullptr;
  // Memory of this thread, 64-byte aligned, kept between ops; contents are not.
  uint8_t* scratch(size_t bytes);

 private:
  uint8_t* memory_ = nullptr;
  size_t bytes_ = 0;
  friend struct Pool;
};

// The code of one op in one instruction set. Results never depend on how units are shared out.
struct Kernel {
  const char* name;
  // Independent pieces of work for these sizes; they may run in any order, on any thread. Asked once
  // per run, on the calling thread, in the order of the ops and before any of them runs.
  int64_t (*units)(const void* args, const Sizes& sizes);
  // Units that are worth one claim at least.
  int64_t (*grain)(const void* args, const Sizes& sizes);
  // Do units [begin, end).
  void (*run)(const void* args, const Sizes& sizes, int64_t begin, int64_t end, Worker& worker);
  // Work done for these sizes, for the roofline: bytes of memory traffic and arithmetic operations.
  // A row-wise op is told its rows as TOKENS, whichever of the sizes they are.
  void (*cost)(const void* args, const Sizes& sizes, double* bytes, double* operations);
};

// Append an op. `args` is copied; it is plain data of at most 192 bytes.
// With `row_size` >= 0 the op is *row-wise*: its units are exactly the rows 0 ... sizes.n[row_size] - 1
// and row i depends on row i of its inputs alone. Row-wise ops of one size that follow each other run
// as one stage, a thread taking its rows through all of them while they are in its cache.
// Any other op begins when everything before it is complete. With ON_CALLER it has one unit, and the
// thread that called does it: others may wait there for something outside of the pool.
constexpr int32_t NOT_ROW_WISE = -1, ON_CALLER = -2;
void append(Program* program, const Kernel& kernel, const void* args, size_t args_bytes,
            int32_t row_size);

// The instruction set the process runs with (bn_set_isa, at most what the machine has).
Isa isa();
// The machine looks bytes up in tables of 128 (AVX-512 VBMI), which most that have VNNI do.
bool has_byte_lookup();
// It multiplies pairs of bf16 (AVX512-BF16), which some that have VNNI do.
bool has_bf16_products();

}  // namespace banyan

#define BN_EXPORT extern "C" __attribute__((visibility("default")))
