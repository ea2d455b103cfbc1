// Threads, and programs run on them.
//
// Every thread walks through all stages of a program. A stage's units are dealt out evenly; a thread
// takes its own share piece by piece and then helps the others, so a thread that the system has
// taken off its core holds up one piece and not its share. Nobody enters a stage before the one
// before it is complete. Waiting threads spin for some microseconds and then sleep: an idle pool
// takes no processor time.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "runtime.h"

namespace banyan {

constexpr int MAX_THREADS = 256;
constexpr size_t MAX_ARGS = 192;
constexpr int64_t SPIN_NS = 40000;  // below it sleeping costs more than it saves
constexpr int PIECES = 4;           // pieces a thread's share is cut into at least, if grain allows

namespace {

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A number that grows, and threads that wait for it to pass a value.
struct alignas(64) Signal {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  void set(uint32_t v) {
    value.store(v, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  }
  // Wait until the value is at least v, counted around the end of 32 bits.
  void await(uint32_t v) {
    for (int64_t round = 0, began = 0;; round++) {
      uint32_t seen = value.load(std::memory_order_acquire);
      if ((int32_t)(seen - v) >= 0) return;
      relax();
      if (round % 64 != 63) continue;
      int64_t now = now_ns();
      if (!began) began = now;
      if (now - began < SPIN_NS) continue;
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      seen = value.load(std::memory_order_seq_cst);
      if ((int32_t)(seen - v) < 0) futex(FUTEX_WAIT_PRIVATE, seen);
      sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

 private:
  void futex(int op, uint32_t v) { syscall(SYS_futex, &value, op, v, nullptr, nullptr, 0); }
};

struct Op {
  const Kernel* kernel;
  alignas(16) uint8_t args[MAX_ARGS];
};

struct Stage {
  int32_t first, count;  // ops
  int32_t row_size;      // NOT_ROW_WISE: a single op with units of its own
  int64_t units, grain;  // of the run at hand
};

// One thread's share of a stage.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

struct alignas(64) Left {
  std::atomic<int64_t> units;
};

}  // namespace

struct Program {
  std::vector<Op> ops;
  std::vector<Stage> stages;
  Share* shares = nullptr;  // [stages][threads]
  Left* left = nullptr;     // [stages]
  size_t room = 0;          // entries of shares

  ~Program() { release(); }
  void release() {
    std::free(shares);
    std::free(left);
    shares = nullptr;
    left = nullptr;
    room = 0;
  }
  void reserve(int threads) {
    size_t need = stages.size() * threads;
    if (need <= room) return;
    release();
    room = need < 64 ? 64 : need;
    shares = (Share*)std::aligned_alloc(64, room * sizeof(Share));
    left = (Left*)std::aligned_alloc(64, room * sizeof(Left));
    if (!shares || !left) std::abort();
  }
};

uint8_t* Worker::scratch(size_t bytes) {
  if (bytes > bytes_) {
    std::free(memory_);
    bytes_ = (bytes + 65535) / 65536 * 65536;
    memory_ = (uint8_t*)std::aligned_alloc(64, bytes_);
    if (!memory_) std::abort();
  }
  return memory_;
}

struct Pool {
  int threads = 1;
  Worker workers[MAX_THREADS];
  pthread_t handles[MAX_THREADS];
  int cpus[MAX_THREADS];

  Signal started;   // counts runs that are open to the other threads
  Signal complete;  // counts complete stages over all runs
  // Run number << 16 | open << 15 | threads inside: who comes late must not enter a closed run.
  std::atomic<uint64_t> door{0};
  std::atomic<bool> quit{false};

  Program* program = nullptr;
  Sizes sizes;
  uint32_t base = 0;  // value of `complete` before the run's first stage
  double* seconds = nullptr;

  Pool(int count, const int32_t* where);
  ~Pool();
  void run(Program* p, const Sizes& s, double* times);
  void walk(Worker& worker);
  void serve(int index);
  bool prepare(Program& p);
};

namespace {

void do_units(Program& p, const Stage& stage, const Sizes& sizes, int64_t begin, int64_t end,
              Worker& worker) {
  for (int32_t i = stage.first; i < stage.first + stage.count; i++)
    p.ops[i].kernel->run(p.ops[i].args, sizes, begin, end, worker);
}

struct Birth {
  Pool* pool;
  int index;
};

void* live(void* argument) {
  Birth birth = *(Birth*)argument;
  delete (Birth*)argument;
  birth.pool->serve(birth.index);
  return nullptr;
}

void pin(int cpu) {
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

Pool::Pool(int count, const int32_t* where) {
  for (int i = 0; i < count; i++) {
    cpus[i] = where ? where[i] : -1;
    workers[i].index = i;
    workers[i].count = count;
  }
  for (int i = 1; i < count; i++) {
    if (pthread_create(&handles[i], nullptr, live, new Birth{this, i})) break;
    threads = i + 1;
  }
  for (int i = 0; i < threads; i++) workers[i].count = threads;
}

Pool::~Pool() {
  quit = true;
  started.set(started.value + 1);
  for (int i = 1; i < threads; i++) pthread_join(handles[i], nullptr);
  for (int i = 0; i < threads; i++) std::free(workers[i].memory_);
}

void Pool::serve(int index) {
  pin(cpus[index]);
  for (uint32_t seen = 0;;) {
    started.await(seen + 1);
    seen = started.value.load(std::memory_order_acquire);
    if (quit) return;
    uint64_t at = door.load(std::memory_order_acquire);
    while (at >> 15 & 1)  // open: step in
      if (door.compare_exchange_weak(at, at + 1, std::memory_order_acq_rel)) {
        walk(workers[index]);
        door.fetch_sub(1, std::memory_order_acq_rel);
        break;
      }
  }
}

// Deal out the units of every stage. Returns whether there is work for more than one thread.
bool Pool::prepare(Program& p) {
  bool much = false;
  p.reserve(threads);
  for (size_t s = 0; s < p.stages.size(); s++) {
    Stage& stage = p.stages[s];
    const Op& op = p.ops[stage.first];
    stage.units = stage.row_size >= 0 ? sizes.n[stage.row_size] : op.kernel->units(op.args, sizes);
    int64_t grain = op.kernel->grain(op.args, sizes);
    for (int32_t i = stage.first + 1; i < stage.first + stage.count; i++) {
      int64_t other = p.ops[i].kernel->grain(p.ops[i].args, sizes);
      if (other < grain) grain = other;
    }
    int64_t piece = stage.units / ((int64_t)threads * PIECES);
    stage.grain = grain < 1 ? 1 : grain;
    if (stage.grain < piece) stage.grain = piece;
    much |= stage.units > stage.grain;
    p.left[s].units.store(stage.units, std::memory_order_relaxed);
    int64_t from = 0;
    for (int t = 0; t < threads; t++) {
      // Whole grains, so that a small stage wakes nobody for half a piece.
      int64_t grains = (stage.units + stage.grain - 1) / stage.grain;
      int64_t to = grains * (t + 1) / threads * stage.grain;
      if (to > stage.units) to = stage.units;
      Share& share = p.shares[s * threads + t];
      share.next.store(from, std::memory_order_relaxed);
      share.end = to;
      from = to;
    }
  }
  return much;
}

void Pool::walk(Worker& worker) {
  Program& p = *program;
  int64_t began = seconds && worker.index == 0 ? now_ns() : 0;
  for (size_t s = 0; s < p.stages.size(); s++) {
    const Stage& stage = p.stages[s];
    if (!stage.units) continue;
    int64_t done = 0;
    for (int turn = 0; turn < threads; turn++) {
      Share& share = p.shares[s * threads + (worker.index + turn) % threads];
      while (share.next.load(std::memory_order_relaxed) < share.end) {
        int64_t begin = share.next.fetch_add(stage.grain, std::memory_order_relaxed);
        if (begin >= share.end) break;
        int64_t end = begin + stage.grain < share.end ? begin + stage.grain : share.end;
        do_units(p, stage, sizes, begin, end, worker);
        done += end - begin;
      }
    }
    uint32_t number = base + (uint32_t)s + 1;
    if (done && p.left[s].units.fetch_sub(done, std::memory_order_acq_rel) == done)
      complete.set(number);
    else
      complete.await(number);
    if (began) {
      int64_t now = now_ns();
      seconds[s] += (double)(now - began) * 1e-9;
      began = now;
    }
  }
}

void Pool::run(Program* p, const Sizes& s, double* times) {
  program = p;
  sizes = s;
  seconds = times;
  bool together = prepare(*p) && threads > 1;
  if (!together && !times) {
    for (const Stage& stage : p->stages)
      if (stage.units) do_units(*p, stage, sizes, 0, stage.units, workers[0]);
    return;
  }
  base = complete.value.load(std::memory_order_relaxed);
  uint64_t number = (door.load(std::memory_order_relaxed) >> 16) + 1;
  door.store(number << 16 | 1 << 15, std::memory_order_release);
  if (together) started.set(started.value.load(std::memory_order_relaxed) + 1);
  walk(workers[0]);
  door.fetch_and(~(uint64_t)(1 << 15), std::memory_order_acq_rel);
  // Threads inside have nothing left to do but to see that the last stage is complete.
  for (int spins = 0; door.load(std::memory_order_acquire) & 0x7fff; spins++)
    spins % 1024 == 1023 ? (void)sched_yield() : relax();
  // Stages without units do not count `complete` up: bring it to a known value.
  complete.set(base + (uint32_t)p->stages.size());
}

void append(Program* program, const Kernel& kernel, const void* args, size_t args_bytes,
            int32_t row_size) {
  if (args_bytes > MAX_ARGS) std::abort();
  Op op;
  op.kernel = &kernel;
  std::memcpy(op.args, args, args_bytes);
  program->ops.push_back(op);
  auto& stages = program->stages;
  int32_t index = (int32_t)program->ops.size() - 1;
  if (row_size >= 0 && !stages.empty() && stages.back().row_size == row_size)
    stages.back().count++;
  else
    stages.push_back(Stage{index, 1, row_size, 0, 1});
}

}  // namespace banyan

using namespace banyan;

// cpus: a processor per thread to pin to (the caller's own thread is never pinned), or null.
BN_EXPORT Pool* bn_pool_new(int32_t threads, const int32_t* cpus) {
  if (threads < 1) threads = 1;
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  return new Pool(threads, cpus);
}
BN_EXPORT void bn_pool_free(Pool* pool) { delete pool; }
BN_EXPORT int32_t bn_pool_threads(const Pool* pool) { return pool->threads; }

BN_EXPORT Program* bn_program_new() { return new Program; }
BN_EXPORT void bn_program_free(Program* program) { delete program; }
BN_EXPORT void bn_program_clear(Program* program) {
  program->ops.clear();
  program->stages.clear();
}
BN_EXPORT int32_t bn_program_ops(const Program* program) { return (int32_t)program->ops.size(); }
BN_EXPORT int32_t bn_program_stages(const Program* program) {
  return (int32_t)program->stages.size();
}
BN_EXPORT const char* bn_program_op_name(const Program* program, int32_t op) {
  return program->ops[op].kernel->name;
}
// The stage an op belongs to, and what it costs for these sizes.
BN_EXPORT int32_t bn_program_op_cost(const Program* program, int32_t op, const int64_t* sizes,
                                     double* bytes, double* operations) {
  Sizes s;
  std::memcpy(s.n, sizes, sizeof s.n);
  program->ops[op].kernel->cost(program->ops[op].args, s, bytes, operations);
  int32_t stage = 0;
  while (program->stages[stage].first + program->stages[stage].count <= op) stage++;
  return stage;
}
// Run all ops. seconds: null, or [stages], to which each stage's wall time is added.
BN_EXPORT void bn_program_run(Pool* pool, Program* program, const int64_t* sizes, double* seconds) {
  Sizes s;
  std::memcpy(s.n, sizes, sizeof s.n);
  pool->run(program, s, seconds);
}
