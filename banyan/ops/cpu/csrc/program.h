// Pools and programs as other parts of the library use them; csrc/pool.cpp says what they do.
#pragma once
#include "runtime.h"

namespace banyan {

// Arguments of the last op, null where it is of another kernel; and a program without that op.
const void* last_args(const Program* program, const Kernel& kernel);
void take_back(Program* program);
// Arguments of the newest op of a kernel, which may be changed; null where there is none.
void* newest_args(Program* program, const Kernel& kernel);

}  // namespace banyan

extern "C" {
banyan::Pool* bn_pool_new(int32_t threads, const int32_t* cpus);
void bn_pool_free(banyan::Pool* pool);
banyan::Program* bn_program_new();
void bn_program_free(banyan::Pool* pool, banyan::Program* program);
const char* bn_program_run(banyan::Pool* pool, banyan::Program* program, const int64_t* sizes,
                           double* seconds);
}
