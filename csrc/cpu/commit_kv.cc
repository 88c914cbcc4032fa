// commit_kv on the CPU: plain copies, one plane (a layer's keys or values) of one request per work item.
//
// Copying in ascending steps is safe in place: node ids ascend along a path from 0, so path[j] >= j, and a
// later step reads slot path[i] > path[j] >= j for i > j, which no step up to j has written.
#include "cerberus/commit_kv.h"

#include <cstring>

#include "parallel.h"

namespace cerberus::CERBERUS_ISA {
namespace {

constexpr int64_t kThreadBytes = 1 << 16;  // copied bytes that pay for a thread

inline __attribute__((always_inline)) void copy_slot(const KvPlane& plane, int64_t source, int64_t target) {
  if (source == target) return;
  if (plane.head_stride == plane.row_bytes) {
    memcpy(plane.data + target, plane.data + source, static_cast<size_t>(plane.heads * plane.row_bytes));
    return;
  }
  for (int64_t head = 0; head < plane.heads; ++head) {
    const int64_t offset = head * plane.head_stride;
    memcpy(plane.data + target + offset, plane.data + source + offset, static_cast<size_t>(plane.row_bytes));
  }
}

}  // namespace

void commit_kv(const CommitKvArgs& args) {
  int64_t accepted = 0;
  for (int64_t b = 0; b < args.batch; ++b) accepted += args.num_accepted[b];
  int64_t bytes = 0;
  for (int64_t i = 0; i < args.num_planes; ++i)
    bytes += args.planes[i].heads * args.planes[i].row_bytes * accepted;
  const int64_t item_bytes = bytes / (1 + args.num_planes * args.batch);
  if (accepted > 0) {
    cpu::parallel_for(args.num_planes * args.batch, 1 + kThreadBytes / (1 + item_bytes),
                      [&](int64_t first, int64_t last) {
                        for (int64_t item = first; item < last; ++item) {
                          const KvPlane& plane = args.planes[item / args.batch];
                          const int64_t b = item % args.batch;
                          const int32_t* path = args.path + b * args.path_stride;
                          const int64_t prefix = args.prefix_lens[b];
                          for (int64_t step = 1; step <= args.num_accepted[b]; ++step) {
                            copy_slot(plane, plane_offset(args, plane, b, prefix + path[step]),
                                      plane_offset(args, plane, b, prefix + step));
                          }
                        }
                      });
  }
  for (int64_t b = 0; b < args.batch; ++b) args.new_lens[b] = args.prefix_lens[b] + args.num_accepted[b] + 1;
}

}  // namespace cerberus::CERBERUS_ISA
