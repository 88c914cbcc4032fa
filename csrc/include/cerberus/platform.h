// What every other header here needs.
#pragma once

// A function that runs on the host and on a GPU alike. On the host it is always inlined: the same header is
// compiled for several instruction-set levels into one library, and an out-of-line copy could be shared
// between them.
#if defined(__CUDACC__) || defined(__HIPCC__)
#define CERBERUS_HD __host__ __device__ __forceinline__
#else
#define CERBERUS_HD inline __attribute__((always_inline))
#endif

// Raw-pointer entry points that other C++ programs may call.
#define CERBERUS_EXPORT __attribute__((visibility("default")))
