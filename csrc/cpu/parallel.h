// Threads for the CPU operators: the OpenMP pool that the process already has, never a second one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cerberus/platform.h"

namespace cerberus::cpu {

// Threads a parallel_for may use now: the count of the process's OpenMP runtime (torch.set_num_threads sets
// it).
CERBERUS_EXPORT int num_threads();

// Name of the runtime that lends its threads, or "none" where the work runs on the caller alone.
CERBERUS_EXPORT const char* thread_runtime();

// Run body(context, first, last) over disjoint ranges that cover [0, items). `grain` is the least number of
// items worth a thread. Ranges depend on the thread count: a result must not depend on where ranges begin.
void parallel_for_ranges(int64_t items, int64_t grain, void (*body)(void*, int64_t, int64_t), void* context);

// The same for a callable `body(first, last)`.
template <typename Body>
inline __attribute__((always_inline)) void parallel_for(int64_t items, int64_t grain, Body&& body) {
  using Plain = typename std::remove_reference<Body>::type;
  parallel_for_ranges(
      items, grain,
      [](void* context, int64_t first, int64_t last) { (*static_cast<Plain*>(context))(first, last); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace cerberus::cpu
