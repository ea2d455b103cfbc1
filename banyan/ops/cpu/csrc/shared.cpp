// Collectives between the ranks of one machine, over memory that all of them have mapped.
//
// Every rank has a seat and two slots in the segment. A collective works in pieces of a slot, and a
// piece is one *turn*: write your slot, say so in your seat, wait for all others, read their slots.
// Turns use the two slots alternately: who has come to a turn has read all of the turn before it,
// so nobody writes into what is still read, and no second meeting is needed. `send` and `recv` have
// a lane per pair of ranks, which the others do not see.
//
// Sums add the ranks' numbers in the order of the ranks, one element like another: they have the
// same bits on every rank and for any number of rows.
//
// Ranks wait on a word in their seats: a short spin, then sleep. Who sleeps looks up from time to
// time whether the one it waits for still holds the lock on its byte of the file (the system takes
// it away from the dead), whether somebody has given up, and whether its own time is over. Then the
// segment is lost: every collective on it fails, with the number of the rank that did not come.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace banyan {

constexpr int MAX_RANKS = 64;
constexpr uint64_t MAGIC = 0x316b6e61726e7962ull;  // "bynrank1"
constexpr int64_t LOOK_NS = 50000000;              // how often a sleeper looks up
constexpr int64_t LINE = 64;
constexpr uint32_t OUT_OF_STEP = 1 + MAX_RANKS;    // nobody knows which of two ranks has strayed
constexpr int64_t SUM_BLOCK = 2048;  // floats that stay in the first cache while ranks are added

namespace {

enum Kind : uint64_t {
  MEET = 1, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, GATHER_ROWS,
  REDUCE_ROWS, GATHER_COLUMNS, SEND, DISPATCH, COMBINE, NUM_KINDS
};
constexpr const char* KINDS[] = {"nothing",        "meet",          "all_reduce",
                                 "all_gather",     "reduce_scatter", "all_to_all",
                                 "broadcast",      "gather_rows",   "reduce_rows",
                                 "gather_columns", "send",          "dispatch_rows",
                                 "combine_rows"};

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

// A number that grows, in memory of several processes.
struct alignas(LINE) Signal {
  std::atomic<uint32_t> value, sleepers;

  void set(uint32_t v) {
    value.store(v, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst))
      syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  bool has_come_to(uint32_t v) const {
    return (int32_t)(value.load(std::memory_order_acquire) - v) >= 0;
  }
  void sleep_below(uint32_t v) {
    timespec slice{0, LOOK_NS};
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    uint32_t seen = value.load(std::memory_order_seq_cst);
    if ((int32_t)(seen - v) < 0) syscall(SYS_futex, &value, FUTEX_WAIT, seen, &slice, nullptr, 0);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};

struct alignas(LINE) Seat {
  Signal arrived;  // the newest turn
  std::atomic<uint32_t> is_taken;
  uint64_t what[2];                // by parity of the turn: what this rank is doing
};

// From one rank to another.
struct alignas(LINE) Lane {
  Signal posted, taken;  // pieces
  uint64_t what[2];
};

struct alignas(LINE) Header {
  uint64_t magic;
  int64_t ranks, slot_bytes;
  // 0, 1 + the rank that did not come, or OUT_OF_STEP.
  alignas(LINE) std::atomic<uint32_t> lost;
  Seat seats[MAX_RANKS];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "other processes have no such lock");

uint64_t what_of(Kind kind, int64_t bytes) { return (uint64_t)kind << 56 | (uint64_t)bytes; }

int64_t lanes_at() { return sizeof(Header); }
int64_t slots_at(int64_t ranks) {
  int64_t end = lanes_at() + ranks * ranks * (int64_t)sizeof(Lane);
  return (end + 4095) / 4096 * 4096;
}

}  // namespace

// One rank's end of a segment.
struct Shared {
  Header* header;
  Lane* lanes;
  uint8_t* slots;  // [2][ranks] of turns, then [from][to][2] of lanes
  int32_t rank, ranks, fd;
  int64_t slot, timeout_ns, spin_ns;
  uint32_t turn = 0;
  uint32_t sent[MAX_RANKS] = {}, received[MAX_RANKS] = {};
  char failure[240] = "";

  Seat& seat(int32_t r) { return header->seats[r]; }
  uint8_t* slot_of(int32_t r) { return slots + ((turn & 1) * ranks + r) * slot; }
  const float* floats_of(int32_t r) { return (const float*)slot_of(r); }
  Lane& lane(int32_t from, int32_t to) { return lanes[from * ranks + to]; }
  uint8_t* lane_slot(int32_t from, int32_t to, uint32_t piece) {
    return slots + (2 * ranks + (from * ranks + to) * 2 + (piece & 1)) * slot;
  }

  // Whether collectives are possible at all; else the worker learns why not.
  bool begin(Worker& worker) {
    if (!failure[0] && header->lost.load(std::memory_order_relaxed)) is_lost();
    if (failure[0]) worker.failure = failure;
    return !failure[0];
  }
  uint8_t* open_turn() {
    turn++;
    return slot_of(rank);
  }
  bool meet(uint64_t what, Worker& worker);
  bool await(Signal& signal, uint32_t v, int32_t whom);
  bool agree(uint64_t mine, uint64_t theirs, int32_t whom);
  bool is_lost();
  bool is_gone(int32_t whom);
  bool lose(int32_t whom, const char* how);
};

// Returns false when that will not happen; `failure` says why.
bool Shared::await(Signal& signal, uint32_t v, int32_t whom) {
  bool slept = false;
  for (int64_t round = 0, began = 0;; round++) {
    if (signal.has_come_to(v)) return true;
    relax();
    if (round % 64 != 63) continue;
    int64_t now = now_ns();
    if (!began) began = now;
    if (now - began < spin_ns) continue;
    if (header->lost.load(std::memory_order_acquire)) return is_lost();
    if (now - began >= timeout_ns) {
      char how[60];
      std::snprintf(how, sizeof how, "did not come within %.3g s", (double)timeout_ns * 1e-9);
      return lose(whom, how);
    }
    // It may have come and then ended.
    if (slept && is_gone(whom)) return signal.has_come_to(v) || lose(whom, "has ended");
    signal.sleep_below(v);
    slept = true;
    round = -1;
  }
}

// Bring everybody's slots of this turn together.
bool Shared::meet(uint64_t what, Worker& worker) {
  Seat& mine = seat(rank);
  mine.what[turn & 1] = what;
  mine.arrived.set(turn);
  bool good = true;
  for (int32_t i = 1; i < ranks && good; i++) {
    int32_t r = (rank + i) % ranks;
    good = await(seat(r).arrived, turn, r) && agree(what, seat(r).what[turn & 1], r);
  }
  if (!good) worker.failure = failure;
  return good;
}

bool Shared::agree(uint64_t mine, uint64_t theirs, int32_t whom) {
  if (mine == theirs) return true;
  constexpr uint64_t BYTES = (1ull << 56) - 1;
  uint64_t kind = theirs >> 56;
  std::snprintf(failure, sizeof failure,
                "ranks are not in step: rank %d is in %s of %lld bytes, rank %d in %s of %lld bytes",
                rank, KINDS[mine >> 56], (long long)(mine & BYTES), whom,
                kind < NUM_KINDS ? KINDS[kind] : "?", (long long)(theirs & BYTES));
  uint32_t none = 0;
  header->lost.compare_exchange_strong(none, OUT_OF_STEP);
  return false;
}

bool Shared::lose(int32_t whom, const char* how) {
  uint32_t none = 0;
  if (!header->lost.compare_exchange_strong(none, 1 + (uint32_t)whom)) return is_lost();
  std::snprintf(failure, sizeof failure, "rank %d %s; rank %d waited for it", whom, how, rank);
  return false;
}

bool Shared::is_lost() {
  uint32_t why = header->lost.load(std::memory_order_acquire);
  if (why == OUT_OF_STEP)
    std::snprintf(failure, sizeof failure, "ranks are not in step, another rank says how");
  else
    std::snprintf(failure, sizeof failure, "another rank waited for rank %d in vain",
                  (int)why - 1);
  return false;
}

bool Shared::is_gone(int32_t whom) {
  if (!seat(whom).is_taken.load(std::memory_order_acquire)) return false;  // it has yet to come
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = whom;
  lock.l_len = 1;
  return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

namespace {

// Every op's arguments begin with these.
struct Args {
  Shared* group;
  int32_t size;  // of the leading dimension
};
struct BlockArgs : Args {  // bytes; one block of a row is what one rank gives or gets
  const uint8_t* x;
  uint8_t* out;
  int64_t x_stride, mine, room, total;
};
// Whose rows a batch of several replicas consists of, in memory that changes from step to step.
struct Joint {
  int64_t first, mine;  // this rank's rows
  // Behind them, by rank: rows that it gives.
  int64_t given(int32_t rank) const { return (&mine)[1 + rank]; }
};
struct JointArgs : Args {
  const uint8_t* x;
  uint8_t* out;
  const Joint* rows;
  int64_t row_bytes, x_stride;
};
struct ColumnsArgs : BlockArgs {
  const Joint* rows;
};
struct WholeArgs : Args {
  uint8_t* x;
  int64_t row_bytes;
  int32_t other;
};

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// out = the sum over the ranks, rank 0 first; theirs(r) is where rank r has its numbers.
template <class Theirs>
void add_up(float* out, int64_t count, int32_t ranks, Theirs theirs) {
  for (int64_t at = 0; at < count; at += SUM_BLOCK) {
    int64_t n = least(SUM_BLOCK, count - at);
    float* __restrict to = out + at;
    const float* __restrict first = theirs(0) + at;
    const float* __restrict second = theirs(1) + at;
    for (int64_t i = 0; i < n; i++) to[i] = first[i] + second[i];
    for (int32_t r = 2; r < ranks; r++) {
      const float* __restrict next = theirs(r) + at;
      for (int64_t i = 0; i < n; i++) to[i] += next[i];
    }
  }
}

void all_reduce(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const WholeArgs& a = *(const WholeArgs*)args;
  Shared& g = *a.group;
  if (!g.begin(worker)) return;
  int64_t bytes = sizes.n[a.size] * a.row_bytes;
  for (int64_t at = 0; at < bytes; at += g.slot) {
    int64_t piece = least(g.slot, bytes - at);
    std::memcpy(g.open_turn(), a.x + at, piece);
    if (!g.meet(what_of(ALL_REDUCE, bytes), worker)) return;
    add_up((float*)(a.x + at), piece / 4, g.ranks, [&](int32_t r) { return g.floats_of(r); });
  }
}

// Rows of `blocks` blocks of `room` bytes, in tiles that fill a slot at most:
// tile(row, rows, column, columns), columns in bytes of a block. Stops at the first false.
template <class Tile>
void in_tiles(int64_t slot, int64_t rows, int64_t blocks, int64_t room, Tile tile) {
  int64_t wide = least(room, slot / blocks / LINE * LINE);
  int64_t high = wide ? slot / (blocks * wide) : 0;
  for (int64_t row = 0; row < rows && wide; row += high)
    for (int64_t column = 0; column < room; column += wide)
      if (!tile(row, least(high, rows - row), column, least(wide, room - column))) return;
}

void all_gather(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const BlockArgs& a = *(const BlockArgs*)args;
  Shared& g = *a.group;
  if (!g.begin(worker)) return;
  int64_t rows = sizes.n[a.size];
  in_tiles(g.slot, rows, 1, a.room, [&](int64_t row, int64_t high, int64_t column, int64_t wide) {
    uint8_t* slot = g.open_turn();
    int64_t mine = least(wide, a.mine - column);
    for (int64_t i = 0; i < high && mine > 0; i++)
      std::memcpy(slot + i * wide, a.x + (row + i) * a.x_stride + column, mine);
    if (!g.meet(what_of(ALL_GATHER, rows * a.total), worker)) return false;
    for (int32_t r = 0; r < g.ranks; r++) {
      int64_t first = r * a.room + column, count = least(wide, a.total - first);
      for (int64_t i = 0; i < high && count > 0; i++)
        std::memcpy(a.out + (row + i) * a.total + first, g.slot_of(r) + i * wide, count);
    }
    return true;
  });
}

// My columns of every block of some rows, side by side as [rows][ranks][wide].
void post_blocks(const BlockArgs& a, int64_t row, int64_t high, int64_t column, int64_t wide) {
  Shared& g = *a.group;
  uint8_t* slot = g.open_turn();
  for (int64_t i = 0; i < high; i++)
    for (int32_t r = 0; r < g.ranks; r++)
      std::memcpy(slot + (i * g.ranks + r) * wide,
                  a.x + (row + i) * a.x_stride + r * a.room + column, wide);
}

void reduce_scatter(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const BlockArgs& a = *(const BlockArgs*)args;
  Shared& g = *a.group;
  if (!g.begin(worker)) return;
  int64_t n = sizes.n[a.size];
  in_tiles(g.slot, n, g.ranks, a.room, [&](int64_t row, int64_t high, int64_t column,
                                           int64_t wide) {
    post_blocks(a, row, high, column, wide);
    if (!g.meet(what_of(REDUCE_SCATTER, n * a.room), worker)) return false;
    for (int64_t i = 0; i < high; i++)
      add_up((float*)(a.out + (row + i) * a.room + column), wide / 4, g.ranks, [&](int32_t r) {
        return g.floats_of(r) + (i * g.ranks + g.rank) * (wide / 4);
      });
    return true;
  });
}

void all_to_all(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const BlockArgs& a = *(const BlockArgs*)args;
  Shared& g = *a.group;
  if (!g.begin(worker)) return;
  int64_t n = sizes.n[a.size];
  in_tiles(g.slot, n, g.ranks, a.room, [&](int64_t row, int64_t high, int64_t column,
                                           int64_t wide) {
    post_blocks(a, row, high, column, wide);
    if (!g.meet(what_of(ALL_TO_ALL, n * a.room), worker)) return false;
    for (int64_t i = 0; i < high; i++)
      for (int32_t r = 0; r < g.ranks; r++)
        std::memcpy(a.out + (row + i) * a.total + r * a.room + column,
                    g.slot_of(r) + (i * g.ranks + g.rank) * wide, wide);
    return true;
  });
}

void broadcast(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const WholeArgs& a = *(const WholeArgs*)args;
  Shared& g = *a.group;
  if (!g.begin(worker)) return;
  int64_t bytes = sizes.n[a.size] * a.row_bytes;
  for (int64_t at = 0; at < bytes; at += g.slot) {
    int64_t piece = least(g.slot, bytes - at);
    uint8_t* slot = g.open_turn();
    if (g.rank == a.other) std::memcpy(slot, a.x + at, piece);
    if (!g.meet(what_of(BROADCAST, bytes), worker)) return;
    if (g.rank != a.other) std::memcpy(a.x + at, g.slot_of(a.other), piece);
  }
}

// `size` counts the rows of all; a rank gives `given` of them, those of rank 0 come first.
// Bytes at ... at + bytes - 1 of rows that lie x_stride apart, as if they lay behind one another.
void take_rows(uint8_t* to, const JointArgs& a, int64_t at, int64_t bytes) {
  if (a.x_stride == a.row_bytes) {
    std::memcpy(to, a.x + at, bytes);
    return;
  }
  while (bytes > 0) {
    int64_t inside = at % a.row_bytes, some = least(bytes, a.row_bytes - inside);
    std::memcpy(to, a.x + at / a.row_bytes * a.x_stride + inside, some);
    to += some, at += some, bytes -= some;
  }
}

void gather_rows(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const JointArgs& a = *(const JointArgs*)args;
  Shared& g = *a.group;
  if (!g.begin(worker)) return;
  int64_t all = sizes.n[a.size] * a.row_bytes, sum = 0, longest = 0;
  for (int32_t r = 0; r < g.ranks; r++) {
    int64_t given = a.rows->given(r) * a.row_bytes;
    if (given > longest) longest = given;
    sum += given;
  }
  if (sum != all) {
    std::snprintf(g.failure, sizeof g.failure, "the ranks give %lld bytes of rows, not %lld",
                  (long long)sum, (long long)all);
    worker.failure = g.failure;
    return;
  }
  int64_t mine = a.rows->given(g.rank) * a.row_bytes;
  for (int64_t at = 0; at < longest; at += g.slot) {
    uint8_t* slot = g.open_turn();
    if (at < mine) take_rows(slot, a, at, least(g.slot, mine - at));
    if (!g.meet(what_of(GATHER_ROWS, all), worker)) return;
    uint8_t* to = a.out + at;
    for (int32_t r = 0; r < g.ranks; r++) {
      int64_t given = a.rows->given(r) * a.row_bytes;
      if (at < given) std::memcpy(to, g.slot_of(r), least(g.slot, given - at));
      to += given;
    }
  }
}

// As all_reduce, but of the sum each rank keeps its own rows.
void reduce_rows(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const JointArgs& a = *(const JointArgs*)args;
  Shared& g = *a.group;
  if (!g.begin(worker)) return;
  int64_t bytes = sizes.n[a.size] * a.row_bytes;
  int64_t first = a.rows->first * a.row_bytes, last = first + a.rows->mine * a.row_bytes;
  for (int64_t at = 0; at < bytes; at += g.slot) {
    int64_t end = at + least(g.slot, bytes - at);
    std::memcpy(g.open_turn(), a.x + at, end - at);
    if (!g.meet(what_of(REDUCE_ROWS, bytes), worker)) return;
    int64_t low = first > at ? first : at, high = least(last, end);
    if (low < high)
      add_up((float*)(a.out + low - first), (high - low) / 4, g.ranks,
             [&](int32_t r) { return (const float*)(g.slot_of(r) + low - at); });
  }
}

// As all_gather, but of the whole each rank keeps its own rows.
void gather_columns(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const ColumnsArgs& a = *(const ColumnsArgs*)args;
  Shared& g = *a.group;
  if (!g.begin(worker)) return;
  int64_t rows = sizes.n[a.size], first = a.rows->first, last = first + a.rows->mine;
  in_tiles(g.slot, rows, 1, a.room, [&](int64_t row, int64_t high, int64_t column, int64_t wide) {
    uint8_t* slot = g.open_turn();
    int64_t mine = least(wide, a.mine - column);
    for (int64_t i = 0; i < high && mine > 0; i++)
      std::memcpy(slot + i * wide, a.x + (row + i) * a.x_stride + column, mine);
    if (!g.meet(what_of(GATHER_COLUMNS, rows * a.total), worker)) return false;
    for (int32_t r = 0; r < g.ranks; r++) {
      int64_t to = r * a.room + column, count = least(wide, a.total - to);
      for (int64_t i = 0; i < high && count > 0; i++)
        if (first <= row + i && row + i < last)
          std::memcpy(a.out + (row + i - first) * a.total + to, g.slot_of(r) + i * wide, count);
    }
    return true;
  });
}

void send(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const WholeArgs& a = *(const WholeArgs*)args;
  Shared& g = *a.group;
  if (!g.begin(worker)) return;
  Lane& lane = g.lane(g.rank, a.other);
  int64_t bytes = sizes.n[a.size] * a.row_bytes;
  for (int64_t at = 0; at < bytes; at += g.slot) {
    uint32_t piece = ++g.sent[a.other];
    if (!g.await(lane.taken, piece - 2, a.other)) {
      worker.failure = g.failure;
      return;
    }
    std::memcpy(g.lane_slot(g.rank, a.other, piece), a.x + at, least(g.slot, bytes - at));
    lane.what[piece & 1] = what_of(SEND, bytes);
    lane.posted.set(piece);
  }
}

void recv(const void* args, const Sizes& sizes, int64_t, int64_t, Worker& worker) {
  const WholeArgs& a = *(const WholeArgs*)args;
  Shared& g = *a.group;
  if (!g.begin(worker)) return;
  Lane& lane = g.lane(a.other, g.rank);
  int64_t bytes = sizes.n[a.size] * a.row_bytes;
  for (int64_t at = 0; at < bytes; at += g.slot) {
    uint32_t piece = ++g.received[a.other];
    if (!g.await(lane.posted, piece, a.other) ||
        !g.agree(what_of(SEND, bytes), lane.what[piece & 1], a.other)) {
      worker.failure = g.failure;
      return;
    }
    std::memcpy(a.x + at, g.lane_slot(a.other, g.rank, piece), least(g.slot, bytes - at));
    lane.taken.set(piece);
  }
}

void meet_all(const void* args, const Sizes&, int64_t, int64_t, Worker& worker) {
  Shared& g = *((const Args*)args)->group;
  if (!g.begin(worker)) return;
  g.open_turn();
  g.meet(what_of(MEET, 0), worker);
}

// All ranks have the same number of rows, so all of them leave out what has none.
int64_t if_any(const void* args, const Sizes& sizes) {
  return sizes.n[((const Args*)args)->size] > 0;
}
int64_t always(const void*, const Sizes&) { return 1; }

void cost_of_blocks(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const BlockArgs& a = *(const BlockArgs*)args;
  *bytes = (double)(sizes.n[a.size] * a.room) * a.group->ranks * 4;  // in, slot, slot, out
  *operations = 0;
}
void cost_of_sums(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const BlockArgs& a = *(const BlockArgs*)args;
  double block = (double)(sizes.n[a.size] * a.room);
  *bytes = block * (3 * a.group->ranks + 1);
  *operations = block / 4 * (a.group->ranks - 1);
}
void cost_of_whole(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const WholeArgs& a = *(const WholeArgs*)args;
  *bytes = (double)(sizes.n[a.size] * a.row_bytes) * 2;
  *operations = 0;
}
void cost_of_all_reduce(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const WholeArgs& a = *(const WholeArgs*)args;
  double whole = (double)(sizes.n[a.size] * a.row_bytes);
  *bytes = whole * (a.group->ranks + 3);
  *operations = whole / 4 * (a.group->ranks - 1);
}
void cost_of_joint(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const JointArgs& a = *(const JointArgs*)args;
  *bytes = (double)(sizes.n[a.size] * a.row_bytes) * 2;
  *operations = 0;
}
void cost_of_joint_sums(const void* args, const Sizes& sizes, double* bytes, double* operations) {
  const JointArgs& a = *(const JointArgs*)args;
  double own = (double)(a.rows->mine * a.row_bytes);
  *bytes = (double)(sizes.n[a.size] * a.row_bytes) * 2 + own * (a.group->ranks + 1);
  *operations = own / 4 * (a.group->ranks - 1);
}
void cost_of_nothing(const void*, const Sizes&, double* bytes, double* operations) {
  *bytes = *operations = 0;
}

const Kernel ALL_REDUCE_KERNEL = {"all_reduce", if_any, always, all_reduce, cost_of_all_reduce};
const Kernel ALL_GATHER_KERNEL = {"all_gather", if_any, always, all_gather, cost_of_blocks};
const Kernel REDUCE_SCATTER_KERNEL = {"reduce_scatter", if_any, always, reduce_scatter,
                                      cost_of_sums};
const Kernel ALL_TO_ALL_KERNEL = {"all_to_all", if_any, always, all_to_all, cost_of_blocks};
const Kernel BROADCAST_KERNEL = {"broadcast", if_any, always, broadcast, cost_of_whole};
const Kernel GATHER_ROWS_KERNEL = {"gather_rows", if_any, always, gather_rows, cost_of_joint};
const Kernel REDUCE_ROWS_KERNEL = {"reduce_rows", if_any, always, reduce_rows, cost_of_joint_sums};
const Kernel GATHER_COLUMNS_KERNEL = {"gather_columns", if_any, always, gather_columns,
                                      cost_of_blocks};
const Kernel SEND_KERNEL = {"send", if_any, always, send, cost_of_whole};
const Kernel RECV_KERNEL = {"recv", if_any, always, recv, cost_of_whole};
const Kernel MEET_KERNEL = {"meet", always, always, meet_all, cost_of_nothing};

#include "shared_experts.inl"

template <class A>
void add(Program* program, const Kernel& kernel, const A& args) {
  append(program, kernel, &args, sizeof args, ON_CALLER);
}

}  // namespace

}  // namespace banyan

using namespace banyan;

// Bytes of a segment.
BN_EXPORT int64_t bn_shared_bytes(int32_t ranks, int64_t slot_bytes) {
  return slots_at(ranks) + (2 * (int64_t)ranks + 2 * (int64_t)ranks * ranks) * slot_bytes;
}
BN_EXPORT int32_t bn_shared_most_ranks() { return MAX_RANKS; }

// Take this rank's seat in a segment that is mapped at `memory` from the open file `fd`. Rank 0
// comes first, to memory of zeros. Null and the reason when that is impossible.
BN_EXPORT Shared* bn_shared_open(uint8_t* memory, int32_t fd, int32_t rank, int32_t ranks,
                                 int64_t slot_bytes, double timeout_s, int64_t spin_ns, char* why,
                                 int32_t room) {
  Header* header = (Header*)memory;
  if (ranks < 2 || ranks > MAX_RANKS || slot_bytes < LINE * ranks || slot_bytes % LINE) {
    std::snprintf(why, room, "%d ranks with slots of %lld bytes: 2 to %d ranks, 64 bytes for each",
                  ranks, (long long)slot_bytes, MAX_RANKS);
    return nullptr;
  }
  if (rank == 0) {
    header->ranks = ranks;
    header->slot_bytes = slot_bytes;
    header->magic = MAGIC;
  }
  if (header->magic != MAGIC || header->ranks != ranks || header->slot_bytes != slot_bytes) {
    std::snprintf(why, room, "it was not made for %d ranks and slots of %lld bytes", ranks,
                  (long long)slot_bytes);
    return nullptr;
  }
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  if (fcntl(fd, F_OFD_SETLK, &lock)) {
    std::snprintf(why, room, "the seat of rank %d is taken, or cannot be locked", rank);
    return nullptr;
  }
  header->seats[rank].is_taken.store(1, std::memory_order_release);
  Shared* group = new Shared;
  group->header = header;
  group->lanes = (Lane*)(memory + lanes_at());
  group->slots = memory + slots_at(ranks);
  group->rank = rank, group->ranks = ranks, group->fd = fd;
  group->slot = slot_bytes;
  group->timeout_ns = (int64_t)(timeout_s * 1e9), group->spin_ns = spin_ns;
  return group;
}
BN_EXPORT void bn_shared_free(Shared* group) { delete group; }

// Wait until all ranks have come here.
BN_EXPORT void bn_meet(Program* program, int32_t size, Shared* group) {
  add(program, MEET_KERNEL, Args{group, size});
}
// x: contiguous fp32, replaced by its sum over the ranks.
BN_EXPORT void bn_all_reduce(Program* program, int32_t size, Shared* group, float* x, int64_t dim) {
  add(program, ALL_REDUCE_KERNEL, WholeArgs{{group, size}, (uint8_t*)x, dim * 4, 0});
}
// In the next three all widths and strides are in bytes.
// x: [n, mine], rows x_stride apart; out: [n, total], of which each rank has `room`, the last less.
BN_EXPORT void bn_all_gather(Program* program, int32_t size, Shared* group, const void* x,
                             int64_t x_stride, void* out, int64_t mine, int64_t room,
                             int64_t total) {
  add(program, ALL_GATHER_KERNEL,
      BlockArgs{{group, size}, (const uint8_t*)x, (uint8_t*)out, x_stride, mine, room, total});
}
// x: [n, ranks · room] fp32; out: [n, room], this rank's share of the sum.
BN_EXPORT void bn_reduce_scatter(Program* program, int32_t size, Shared* group, const void* x,
                                 int64_t x_stride, void* out, int64_t room) {
  add(program, REDUCE_SCATTER_KERNEL,
      BlockArgs{{group, size}, (const uint8_t*)x, (uint8_t*)out, x_stride, room, room,
                room * group->ranks});
}
// x: [n, ranks · room]; out: the same, its block r from rank r.
BN_EXPORT void bn_all_to_all(Program* program, int32_t size, Shared* group, const void* x,
                             int64_t x_stride, void* out, int64_t room) {
  add(program, ALL_TO_ALL_KERNEL,
      BlockArgs{{group, size}, (const uint8_t*)x, (uint8_t*)out, x_stride, room, room,
                room * group->ranks});
}
// rows: two numbers, the first of this rank's rows and how many it has; then how many each rank
// gives. x: contiguous rows; out: those of all ranks, [size, row_bytes].
BN_EXPORT void bn_gather_rows(Program* program, int32_t size, Shared* group, const void* x,
                              int64_t x_stride, void* out, const int64_t* rows,
                              int64_t row_bytes) {
  add(program, GATHER_ROWS_KERNEL,
      JointArgs{{group, size}, (const uint8_t*)x, (uint8_t*)out, (const Joint*)rows, row_bytes,
                x_stride});
}
// x: the rows of all, contiguous fp32; out: this rank's rows of the sum over the ranks.
BN_EXPORT void bn_reduce_rows(Program* program, int32_t size, Shared* group, const void* x,
                              void* out, const int64_t* rows, int64_t row_bytes) {
  add(program, REDUCE_ROWS_KERNEL,
      JointArgs{{group, size}, (const uint8_t*)x, (uint8_t*)out, (const Joint*)rows, row_bytes,
                row_bytes});
}
// As bn_all_gather, of the rows of all; out: this rank's rows alone.
BN_EXPORT void bn_gather_columns(Program* program, int32_t size, Shared* group, const void* x,
                                 int64_t x_stride, void* out, int64_t mine, int64_t room,
                                 int64_t total, const int64_t* rows) {
  add(program, GATHER_COLUMNS_KERNEL,
      ColumnsArgs{{{group, size}, (const uint8_t*)x, (uint8_t*)out, x_stride, mine, room, total},
                  (const Joint*)rows});
}
// x: this rank's rows, of those of all; out: room for all of them, of which those get there that have
// an expert on this rank. rows: as for bn_gather_rows. places: [size, per_token], the place of each
// pair, `of_rank` of them on each rank.
BN_EXPORT void bn_dispatch_rows(Program* program, int32_t size, Shared* group, const void* x,
                                int64_t x_stride, void* out, const int64_t* rows,
                                const int64_t* places, int64_t row_bytes, int64_t of_rank,
                                int32_t per_token) {
  add(program, DISPATCH_KERNEL,
      ExpertRowsArgs{{group, size}, (const uint8_t*)x, (uint8_t*)out, (const Joint*)rows, places,
                     row_bytes, x_stride, of_rank, per_token, 0});
}
// x: contiguous fp32 rows of all tokens, or if `is_apart` of all pairs, of which those count that have
// an expert on this rank; out: this rank's rows of them, added in the order of the ranks, or of their
// pairs. rows: null where all ranks have the same.
BN_EXPORT void bn_combine_rows(Program* program, int32_t size, Shared* group, const void* x,
                               void* out, const int64_t* rows, const int64_t* places,
                               int64_t row_bytes, int64_t of_rank, int32_t per_token,
                               int32_t is_apart) {
  add(program, COMBINE_KERNEL,
      ExpertRowsArgs{{group, size}, (const uint8_t*)x, (uint8_t*)out, (const Joint*)rows, places,
                     row_bytes, row_bytes, of_rank, per_token, is_apart});
}
BN_EXPORT void bn_broadcast(Program* program, int32_t size, Shared* group, void* x,
                            int64_t row_bytes, int32_t source) {
  add(program, BROADCAST_KERNEL, WholeArgs{{group, size}, (uint8_t*)x, row_bytes, source});
}
BN_EXPORT void bn_send(Program* program, int32_t size, Shared* group, const void* x,
                       int64_t row_bytes, int32_t to) {
  add(program, SEND_KERNEL, WholeArgs{{group, size}, (uint8_t*)x, row_bytes, to});
}
BN_EXPORT void bn_recv(Program* program, int32_t size, Shared* group, void* x, int64_t row_bytes,
                       int32_t from) {
  add(program, RECV_KERNEL, WholeArgs{{group, size}, (uint8_t*)x, row_bytes, from});
}
