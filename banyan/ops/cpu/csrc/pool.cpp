// Threads, and programs run on them.
//
// Every thread walks through all stages of a program. A stage's units are dealt out evenly; a thread
// takes its own share piece by piece and then helps the others, so a thread that the system has
// taken off its core holds up one piece and not its share. Nobody enters a stage before the one
// before it is complete. Waiting threads spin for some microseconds and then sleep: an idle pool
// takes no processor time.
//
// When others want the processor too, a thread that has been taken off its core in the middle of a
// piece makes all others wait for as long as the system likes. A pool that sees this happen run after
// run goes on with one thread less, and tries the full number again from time to time.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "program.h"

namespace banyan {

constexpr int MAX_THREADS = 256;
constexpr size_t MAX_ARGS = 192;
constexpr int64_t SPIN_NS = 40000;  // below it sleeping costs more than it saves
constexpr int CLAIMED = 4;          // of so many parts of what is left of a share, one is claimed
constexpr int CROWDED_RUNS = 4;     // runs in a row after which a thread is left out
constexpr int64_t LATE_NS = 500000;
constexpr int FIRST_REST = 64, LONGEST_REST = 1024;  // runs until the full number is tried again

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
  // Wait until the value is at least v, counted around the end of 32 bits. Returns how long that
  // took if it was worth sleeping, else 0.
  int64_t await(uint32_t v) {
    bool slept = false;
    for (int64_t round = 0, began = 0;; round++) {
      uint32_t seen = value.load(std::memory_order_acquire);
      if ((int32_t)(seen - v) >= 0) return slept ? now_ns() - began : 0;
      relax();
      if (round % 64 != 63) continue;
      int64_t now = now_ns();
      if (!began) began = now;
      if (now - began < SPIN_NS) continue;
      slept = true;
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
  int32_t row_size;      // NOT_ROW_WISE, ON_CALLER: a single op with units of its own
};

// One thread's share of a stage. It is claimed in pieces that shrink with what is left, so that
// whoever comes to help at the end finds pieces small enough to finish together.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;

  // Takes units [begin, begin + the result); 0 when none are left. Pieces are whole grains.
  int64_t claim(int64_t grain, int64_t& begin) {
    begin = next.load(std::memory_order_relaxed);
    for (;;) {
      int64_t left = end - begin;
      if (left <= 0) return 0;
      int64_t count = left / CLAIMED / grain * grain;
      if (count < grain) count = grain < left ? grain : left;
      if (next.compare_exchange_weak(begin, begin + count, std::memory_order_relaxed)) return count;
    }
  }
};

// A stage in a run.
struct alignas(64) Progress {
  std::atomic<int64_t> left;  // units
  int64_t units, grain;
  int64_t ended;  // when its last unit was, in a run that is timed
};

}  // namespace

struct Program {
  std::vector<Op> ops;
  std::vector<Stage> stages;
};

namespace {

// What the threads share while a program runs.
struct Run {
  // Open << 15 | threads inside: who comes late must not enter a run that has ended.
  std::atomic<uint32_t> door{0};
  Program* program = nullptr;
  Sizes sizes;
  int threads = 1;
  uint32_t base = 0;  // value of `complete` before the first stage
  int64_t began = 0;
  bool timed = false;
  Progress* stages = nullptr;
  Share* shares = nullptr;  // [stages][threads]
  size_t num_stages = 0, num_shares = 0;

  ~Run() {
    std::free(stages);
    std::free(shares);
  }
  bool deal_out();
  void add_times(double* seconds) const;
  void await_empty() {
    for (int spins = 0; door.load(std::memory_order_acquire) & 0x7fff; spins++)
      spins % 1024 == 1023 ? (void)sched_yield() : relax();
  }
};

template <class T>
void grow(T*& memory, size_t& room, size_t need) {
  if (need <= room) return;
  std::free(memory);
  room = need < 64 ? 64 : need;
  memory = (T*)std::aligned_alloc(64, room * sizeof(T));
  if (!memory) std::abort();
}

}  // namespace

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

  Signal started;   // the number of the newest shared run
  Signal complete;  // counts complete stages over all runs
  // Runs take turns with these, so that a thread that is late to leave one holds up none.
  Run runs[2];
  std::atomic<int> active{1};  // threads that take part
  std::atomic<bool> quit{false};
  int bell = -1;  // an eventfd that the next run rings
  int crowded = 0, rest = 0, next_rest = FIRST_REST;

  Pool(int count, const int32_t* where);
  ~Pool();
  const char* run(Program* program, const Sizes& sizes, double* seconds);
  int64_t walk(Run& run, Worker& worker);
  void serve(int index);
  void adapt(int64_t late, int64_t took);
  void await_empty() {
    for (Run& run : runs) run.await_empty();
  }
};

namespace {

void do_units(const Run& run, const Stage& stage, int64_t begin, int64_t end, Worker& worker) {
  for (int32_t i = stage.first; i < stage.first + stage.count; i++) {
    const Op& op = run.program->ops[i];
    op.kernel->run(op.args, run.sizes, begin, end, worker);
  }
}

void ring(int bell) {
  const uint64_t once = 1;
  while (write(bell, &once, sizeof once) < 0 && errno == EINTR) {}
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
  active = threads;
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
    if (index >= active.load(std::memory_order_relaxed)) continue;
    Run& run = runs[seen & 1];
    uint32_t at = run.door.load(std::memory_order_acquire);
    while (at >> 15)  // open: step in
      if (run.door.compare_exchange_weak(at, at + 1, std::memory_order_acq_rel)) {
        walk(run, workers[index]);
        run.door.fetch_sub(1, std::memory_order_acq_rel);
        break;
      }
  }
}

// Give every thread its share of every stage. Returns whether there is work for more than one.
bool Run::deal_out() {
  const Program& p = *program;
  grow(stages, num_stages, p.stages.size());
  grow(shares, num_shares, p.stages.size() * threads);
  bool much = false;
  for (size_t s = 0; s < p.stages.size(); s++) {
    const Stage& stage = p.stages[s];
    const Op& first = p.ops[stage.first];
    int64_t units = stage.row_size >= 0 ? sizes.n[stage.row_size]
                                        : first.kernel->units(first.args, sizes);
    int64_t grain = first.kernel->grain(first.args, sizes);
    for (int32_t i = stage.first + 1; i < stage.first + stage.count; i++) {
      int64_t other = p.ops[i].kernel->grain(p.ops[i].args, sizes);
      if (other < grain) grain = other;
    }
    if (grain < 1) grain = 1;
    much |= units > grain;
    stages[s].left.store(units, std::memory_order_relaxed);
    stages[s].units = units;
    stages[s].grain = grain;
    int64_t from = 0, grains = (units + grain - 1) / grain;
    for (int t = 0; t < threads; t++) {  // whole grains, so that nobody wakes for half a piece
      int64_t to = grains * (t + 1) / threads * grain;
      if (to > units || stage.row_size == ON_CALLER) to = units;
      Share& share = shares[s * threads + t];
      share.next.store(from, std::memory_order_relaxed);
      share.end = to;
      from = to;
    }
  }
  return much;
}

// A stage takes from the last unit of the one before it to its own, whoever did them: a thread that
// the system takes off its core finds several stages done when it comes back.
void Run::add_times(double* seconds) const {
  int64_t before = began;
  for (size_t s = 0; s < program->stages.size(); s++) {
    if (!stages[s].units) continue;
    seconds[s] += (double)(stages[s].ended - before) * 1e-9;
    before = stages[s].ended;
  }
}

// Returns how long this thread slept for others to finish.
int64_t Pool::walk(Run& run, Worker& worker) {
  Program& p = *run.program;
  int64_t late = 0;
  for (size_t s = 0; s < p.stages.size(); s++) {
    Progress& progress = run.stages[s];
    if (!progress.units) continue;
    int64_t done = 0, grain = progress.grain;
    bool mine = p.stages[s].row_size != ON_CALLER || worker.index == 0;
    for (int turn = 0; turn < run.threads && mine; turn++) {
      Share& share = run.shares[s * run.threads + (worker.index + turn) % run.threads];
      for (int64_t begin, count; (count = share.claim(grain, begin)); done += count)
        do_units(run, p.stages[s], begin, begin + count, worker);
    }
    uint32_t number = run.base + (uint32_t)s + 1;
    if (done && progress.left.fetch_sub(done, std::memory_order_acq_rel) == done) {
      if (run.timed) progress.ended = now_ns();
      complete.set(number);
    } else {
      late += complete.await(number);
    }
  }
  return late;
}

// Returns null, or why an op of the calling thread failed.
const char* Pool::run(Program* program, const Sizes& sizes, double* seconds) {
  uint32_t number = started.value.load(std::memory_order_relaxed) + 1;
  Run& run = runs[number & 1];
  run.await_empty();
  run.program = program;
  run.sizes = sizes;
  run.timed = seconds;
  run.threads = active.load(std::memory_order_relaxed);
  bool together = run.deal_out() && run.threads > 1;
  run.base = complete.value.load(std::memory_order_relaxed);
  run.began = now_ns();
  if (together) {
    run.door.store(1 << 15, std::memory_order_release);
    started.set(number);
  }
  if (bell >= 0) ring(bell);
  bell = -1;
  int64_t late = walk(run, workers[0]);
  if (seconds) run.add_times(seconds);
  // Stages without units do not count `complete` up: bring it to a known value.
  complete.set(run.base + (uint32_t)program->stages.size());
  if (together) run.door.fetch_and(0x7fff, std::memory_order_acq_rel);
  if (threads > 1 && !seconds) adapt(late, now_ns() - run.began);
  const char* failure = workers[0].failure;
  workers[0].failure = nullptr;
  return failure;
}

void Pool::adapt(int64_t late, int64_t took) {
  int now = active.load(std::memory_order_relaxed);
  if (rest && --rest == 0) {
    active.store(threads, std::memory_order_relaxed);
    crowded = CROWDED_RUNS - 2;  // a short trial
    return;
  }
  if (now == 1 || late < LATE_NS || late < took / 3) {
    if (!rest && crowded && --crowded == 0) next_rest = FIRST_REST;
    return;
  }
  if (++crowded < CROWDED_RUNS) return;
  crowded = 0;
  active.store(now - 1, std::memory_order_relaxed);
  rest = next_rest;
  if (next_rest < LONGEST_REST) next_rest *= 2;
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
    stages.push_back(Stage{index, 1, row_size});
}

const void* last_args(const Program* program, const Kernel& kernel) {
  const auto& ops = program->ops;
  return !ops.empty() && ops.back().kernel == &kernel ? ops.back().args : nullptr;
}

void* newest_args(Program* program, const Kernel& kernel) {
  for (size_t i = program->ops.size(); i--;)
    if (program->ops[i].kernel == &kernel) return program->ops[i].args;
  return nullptr;
}

void take_back(Program* program) {
  program->ops.pop_back();
  if (!--program->stages.back().count) program->stages.pop_back();
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
// The next run rings this eventfd once, when it has begun. Whoever is woken so takes its turn beside the
// run, and not before it.
BN_EXPORT void bn_pool_ring_next(Pool* pool, int32_t bell) { pool->bell = bell; }

BN_EXPORT Program* bn_program_new() { return new Program; }
// pool: what it ran on, null when that has been freed.
BN_EXPORT void bn_program_free(Pool* pool, Program* program) {
  if (pool) pool->await_empty();
  delete program;
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
  int32_t stage = 0;
  while (program->stages[stage].first + program->stages[stage].count <= op) stage++;
  int32_t row_size = program->stages[stage].row_size;
  if (row_size >= 0) s.n[TOKENS] = s.n[row_size];
  program->ops[op].kernel->cost(program->ops[op].args, s, bytes, operations);
  return stage;
}
// Run all ops. seconds: null, or [stages], to which each stage's wall time is added. Returns null, or
// why the run failed.
BN_EXPORT const char* bn_program_run(Pool* pool, Program* program, const int64_t* sizes,
                                     double* seconds) {
  Sizes s;
  std::memcpy(s.n, sizes, sizeof s.n);
  return pool->run(program, s, seconds);
}
// Run all ops for at most `steps` decode steps of one token per row, one after another: behind each
// but the last, the inputs of the next are what it has sampled, one position on. All rows end
// together: where one samples a stop id or has no finite best logit, or when `*hurry` is at least
// `number`.
// sampled, best, tokens, positions, to_positions, lengths: [rows], outputs and inputs of the program.
// places: [groups] where a group's locations [rows] are; at: [groups, steps, rows] what they become.
// stops: the stop ids of row i are stops[first_stop[i]] ... stops[first_stop[i + 1]].
// told: [1], set to how many steps have run whenever another one follows; with `tell` above 0 the
// eventfd `bell` is rung after each so many of them, pace_ns after the last time at the soonest.
// done: how many steps have run. Returns null, or why the last of them failed.
BN_EXPORT const char* bn_program_burst(Pool* pool, Program* program, const int64_t* sizes,
                                       int32_t steps, int32_t rows, const int64_t* sampled,
                                       const float* best, int64_t* tokens, int64_t* positions,
                                       int64_t* to_positions, int32_t* lengths, int32_t groups,
                                       const int64_t* places, const int64_t* at,
                                       const int32_t* first_stop, const int32_t* stops,
                                       const int64_t* hurry, int64_t number, int32_t* told,
                                       int32_t tell, int32_t bell, int64_t pace_ns,
                                       int32_t* done) {
  Sizes s;
  std::memcpy(s.n, sizes, sizeof s.n);
  int64_t rung = now_ns();
  int32_t untold = 0;
  for (*done = 0;;) {
    const char* failure = pool->run(program, s, nullptr);
    bool last = ++*done == steps || failure;
    last |= __atomic_load_n(hurry, __ATOMIC_RELAXED) >= number;
    for (int32_t i = 0; i < rows && !last; i++) {
      last = !(best[i] - best[i] == 0);  // not finite
      for (int32_t k = first_stop[i]; k < first_stop[i + 1]; k++) last |= stops[k] == sampled[i];
    }
    if (last) return failure;
    __atomic_store_n(told, *done, __ATOMIC_RELEASE);
    untold++;
    if (tell > 0 && untold >= tell && now_ns() - rung >= pace_ns) {
      ring(bell);
      rung = now_ns();
      untold = 0;
    }
    for (int32_t i = 0; i < rows; i++) {
      tokens[i] = sampled[i];
      positions[i]++;
      to_positions[i]++;
      lengths[i]++;
    }
    for (int32_t g = 0; g < groups; g++)
      std::memcpy((int64_t*)places[g], at + ((int64_t)g * steps + *done) * rows,
                  rows * sizeof(int64_t));
  }
}
// Run all ops once and forget them.
BN_EXPORT const char* bn_program_run_once(Pool* pool, Program* program, const int64_t* sizes) {
  const char* failure = bn_program_run(pool, program, sizes, nullptr);
  pool->await_empty();
  program->ops.clear();
  program->stages.clear();
  return failure;
}
