// A program whose calling thread is held up outside of any unit while the other thread does two
// stages of 30 ms: prints what each of its three stages is said to have taken, and all together, ns.
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>

#include <atomic>

#include "program.h"

using namespace banyan;

static pthread_t caller;
static sem_t release;
static std::atomic<int> inside{0}, has_left{0}, is_held{0};

static void sleep_ms(long ms) {
  timespec t{0, ms * 1000000};
  while (nanosleep(&t, &t)) {}
}

static void hold(int) {
  is_held = 1;
  while (sem_wait(&release)) {}
}

static int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static int64_t one(const void*, const Sizes&) { return 1; }
static int64_t two(const void*, const Sizes&) { return 2; }
static void nothing(const void*, const Sizes&, double*, double*) {}

// One unit for each thread; the caller's ends first, and the other one waits until it is held.
static void hold_caller(const void*, const Sizes&, int64_t, int64_t, Worker& worker) {
  inside++;
  while (inside < 2) {}
  if (worker.index == 0) {
    has_left = 1;
    return;
  }
  while (!has_left) {}
  sleep_ms(20);
  pthread_kill(caller, SIGUSR1);
  while (!is_held) {}
}

static void work(const void*, const Sizes&, int64_t, int64_t, Worker&) { sleep_ms(30); }

static void let_go(const void*, const Sizes&, int64_t, int64_t, Worker&) {
  sleep_ms(30);
  sem_post(&release);
}

int main() {
  static const Kernel kernels[] = {{"hold", two, one, hold_caller, nothing},
                                   {"work", one, one, work, nothing},
                                   {"let go", one, one, let_go, nothing}};
  caller = pthread_self();
  sem_init(&release, 0, 0);
  struct sigaction action {};
  action.sa_handler = hold;
  sigaction(SIGUSR1, &action, nullptr);
  Pool* pool = bn_pool_new(2, nullptr);
  Program* program = bn_program_new();
  for (const Kernel& kernel : kernels) append(program, kernel, "", 0, NOT_ROW_WISE);
  int64_t sizes[NUM_SIZES] = {};
  double seconds[3] = {};
  int64_t began = now_ns();
  bn_program_run(pool, program, sizes, seconds);
  int64_t took = now_ns() - began;
  for (double s : seconds) printf("%.0f ", s * 1e9);
  printf("%lld\n", (long long)took);
  bn_program_free(pool, program);
  bn_pool_free(pool);
}
