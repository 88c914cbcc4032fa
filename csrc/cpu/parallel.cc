// Finds the OpenMP runtime at first use. torch ships its own libgomp, in some builds under another file name,
// so linking one here could start a second pool that fights with torch's for the same cores.
#include "parallel.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <string>

namespace cerberus::cpu {
namespace {

// The part of GNU's OpenMP ABI that is used; LLVM's and Intel's runtimes export it too.
struct Runtime {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;  // GOMP_parallel
  int (*max_threads)() = nullptr;                                          // omp_get_max_threads
  int (*thread_index)() = nullptr;                                         // omp_get_thread_num
  int (*team_size)() = nullptr;                                            // omp_get_num_threads
  int (*in_parallel)() = nullptr;                                          // omp_in_parallel
  std::string name = "none";

  bool complete() const { return parallel && max_threads && thread_index && team_size && in_parallel; }

  bool take(void* library, const char* label) {
    parallel = reinterpret_cast<decltype(parallel)>(dlsym(library, "GOMP_parallel"));
    max_threads = reinterpret_cast<decltype(max_threads)>(dlsym(library, "omp_get_max_threads"));
    thread_index = reinterpret_cast<decltype(thread_index)>(dlsym(library, "omp_get_thread_num"));
    team_size = reinterpret_cast<decltype(team_size)>(dlsym(library, "omp_get_num_threads"));
    in_parallel = reinterpret_cast<decltype(in_parallel)>(dlsym(library, "omp_in_parallel"));
    if (complete()) name = label;
    return complete();
  }
};

int find_loaded(dl_phdr_info* info, size_t, void* found) {
  const char* base = std::strrchr(info->dlpi_name, '/');
  base = base ? base + 1 : info->dlpi_name;
  // torch's own copy decides: it is the pool that torch's operators run on.
  const bool openmp = std::strncmp(base, "libgomp", 7) == 0 || std::strncmp(base, "libiomp5", 8) == 0 ||
                      std::strncmp(base, "libomp", 6) == 0;
  std::string& best = *static_cast<std::string*>(found);
  if (openmp && (best.empty() || std::strstr(info->dlpi_name, "/torch"))) best = info->dlpi_name;
  return 0;
}

Runtime find_runtime() {
  Runtime runtime;
  std::string path;
  dl_iterate_phdr(find_loaded, &path);
  if (!path.empty()) {
    if (void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD)) {
      if (runtime.take(library, path.c_str())) return runtime;
    }
  }
  if (void* library = dlopen("libgomp.so.1", RTLD_LAZY)) runtime.take(library, "libgomp.so.1");
  return runtime;
}

const Runtime& runtime() {
  static const Runtime found = find_runtime();
  return found;
}

struct Job {
  int64_t items;
  void (*body)(void*, int64_t, int64_t);
  void* context;
};

void run_share(void* argument) {
  const Job& job = *static_cast<Job*>(argument);
  const int64_t team = runtime().team_size();
  const int64_t index = runtime().thread_index();
  const int64_t first = job.items * index / team;
  const int64_t last = job.items * (index + 1) / team;
  if (first < last) job.body(job.context, first, last);
}

}  // namespace

int num_threads() {
  const Runtime& found = runtime();
  return found.complete() && !found.in_parallel() ? found.max_threads() : 1;
}

const char* thread_runtime() { return runtime().name.c_str(); }

void parallel_for_ranges(int64_t items, int64_t grain, void (*body)(void*, int64_t, int64_t), void* context) {
  if (items <= 0) return;
  const int64_t useful = grain > 0 ? (items + grain - 1) / grain : items;
  const int64_t threads = useful > 1 ? num_threads() : 1;
  const int64_t team = threads < useful ? threads : useful;
  if (team <= 1) {
    body(context, 0, items);
    return;
  }
  Job job{items, body, context};
  runtime().parallel(run_share, &job, static_cast<unsigned>(team), 0);
}

}  // namespace cerberus::cpu
