// verify_tree: which drafts of a tree the target model agrees with, and the token that follows them. The
// walks stand here, for host and device; how a row of logits is read is the caller's.
#pragma once

#include <cstdint>

#include "cerberus/dtype.h"
#include "cerberus/tree.h"

namespace cerberus {

enum class VerifyMode : int32_t { greedy = 0, typical = 1, sample = 2, rejection = 3 };

// How siblings were made; see draft_probs.
enum class Drafting : int32_t { deterministic = 0, iid = 1, without_replacement = 2 };

enum VerifyStatus : uint8_t {
  kNanRow = 1,
  kNoFiniteEntry = 2,
  kTokenOutOfRange = 4,
  kMalformedTree = 8,
  kNoDraftMass = 16,
};

// A parameter of a call: one value for all requests, or one per request in `data`.
struct IntegerColumn {
  const void* data;  // null, or uint8, int32 or int64 of `bytes` each
  int64_t stride;
  int64_t value;
  int32_t bytes;

  CERBERUS_HD int64_t operator[](int64_t b) const {
    if (data == nullptr) return value;
    if (bytes == 1) return static_cast<const uint8_t*>(data)[b * stride];
    if (bytes == 4) return static_cast<const int32_t*>(data)[b * stride];
    return static_cast<const int64_t*>(data)[b * stride];
  }
};

struct FloatColumn {
  const float* data;
  int64_t stride;
  float value;

  CERBERUS_HD float operator[](int64_t b) const { return data == nullptr ? value : data[b * stride]; }
};

// The caller answers for trees that first_malformed_node passes, for num_nodes in [1, nodes], for parameters
// in the ranges of the Python function, and in rejection mode for draft_probs.
struct VerifyTreeArgs {
  const void* logits = nullptr;  // [batch, nodes, vocab_size] or [nodes, vocab_size], vocabulary contiguous
  DType dtype = DType::f32;
  int64_t logits_batch_stride = 0;
  int64_t logits_row_stride = 0;
  const void* draft_tokens = nullptr;  // [batch, nodes] or [nodes], int64 if wide_tokens, else int32
  bool wide_tokens = false;
  int64_t tokens_stride = 0;
  const int32_t* parents = nullptr;    // [batch, nodes] or [nodes]; checked by the caller
  int64_t parents_stride = 0;          // 0: one tree for all
  const int32_t* num_nodes = nullptr;  // [batch] or null
  const int32_t* cu_nodes = nullptr;   // [batch + 1] or null; without it logits have a batch dimension
  const void* draft_probs = nullptr;   // as logits: what each node was drawn from, for rejection mode
  DType draft_dtype = DType::f32;
  int64_t draft_batch_stride = 0;
  int64_t draft_row_stride = 0;
  Drafting drafting = Drafting::deterministic;
  int64_t batch = 0;
  int64_t nodes = 0;
  int64_t vocab_size = 0;
  int64_t max_depth = 0;
  IntegerColumn mode{}, top_k{}, seed{}, position{};  // mode: a VerifyMode; top_k: 0 keeps all
  FloatColumn temperature{nullptr, 0, 1.0f}, top_p{nullptr, 0, 1.0f}, min_p{};
  FloatColumn epsilon{nullptr, 0, 0.09f}, delta{nullptr, 0, 0.3f};
  int32_t* tokens = nullptr;        // [batch, max_depth + 1]
  int32_t* num_accepted = nullptr;  // [batch]
  int32_t* path = nullptr;          // [batch, max_depth + 1]
  float* entropy = nullptr;         // [batch]
  uint8_t* status = nullptr;        // [batch]
  char* workspace = nullptr;        // verify_tree_workspace bytes, aligned to 64
  int64_t slots =
      1;  // above 1: requests run side by side, each in a slot of the workspace; 1: one after another
};

// One request's nodes.
struct DraftTree {
  const void* draft_tokens;
  bool wide_tokens;
  const int32_t* parents;
  int32_t num_nodes;
  int32_t max_depth;

  CERBERUS_HD int64_t token(int32_t node) const {
    return wide_tokens ? static_cast<const int64_t*>(draft_tokens)[node]
                       : static_cast<const int32_t*>(draft_tokens)[node];
  }
};

CERBERUS_HD DraftTree draft_tree(const VerifyTreeArgs& args, int64_t b) {
  DraftTree tree;
  const int64_t first = args.cu_nodes ? args.cu_nodes[b] : 0;
  const int64_t token_offset = args.cu_nodes ? first : b * args.tokens_stride;
  tree.draft_tokens = static_cast<const char*>(args.draft_tokens) + token_offset * (args.wide_tokens ? 8 : 4);
  tree.wide_tokens = args.wide_tokens;
  tree.parents = args.parents + (args.cu_nodes ? first : b * args.parents_stride);
  tree.num_nodes = args.cu_nodes    ? static_cast<int32_t>(args.cu_nodes[b + 1] - first)
                   : args.num_nodes ? args.num_nodes[b]
                                    : static_cast<int32_t>(args.nodes);
  tree.max_depth = static_cast<int32_t>(args.max_depth);
  return tree;
}

// Elements from the start of logits or draft_probs to the root's row of request b.
CERBERUS_HD int64_t first_row_offset(const VerifyTreeArgs& args, int64_t b, int64_t batch_stride,
                                     int64_t row_stride) {
  return args.cu_nodes ? args.cu_nodes[b] * row_stride : b * batch_stride;
}

// A row's greatest entry: the lowest id of equals, NaN passed over, 0 where every entry is -inf or NaN.
struct BestEntry {
  float value;
  int32_t token;
  uint8_t status;
};

// Where a walk ended.
struct WalkEnd {
  int32_t depth;
  int32_t node;
  uint8_t status;
};

// Step to the first child that holds the row's token: its best one, or one drawn from it. `read(node, depth)`
// gives that token as a BestEntry; `last` is that of the last row. Writes depth + 1 entries of `path`.
template <typename Read>
CERBERUS_HD WalkEnd walk_matching(const DraftTree& tree, int32_t* path, BestEntry* last, Read&& read) {
  WalkEnd end{0, 0, 0};
  path[0] = 0;
  for (;;) {
    *last = read(end.node, end.depth);
    end.status |= last->status;
    if (last->status != 0 || end.depth == tree.max_depth) return end;
    int32_t child = end.node + 1;
    while (child < tree.num_nodes && !(tree.parents[child] == end.node && tree.token(child) == last->token))
      ++child;
    if (child >= tree.num_nodes) return end;
    end.node = child;
    path[++end.depth] = child;
  }
}

enum class Trial : int32_t { accepted, rejected, no_mass };

// Try the children of each accepted node in order. `read(node)` prepares its row and gives the row's status;
// `attempt(child, token, ordinal, depth)` tries one child against what is left of the row.
template <typename Read, typename Attempt>
CERBERUS_HD WalkEnd walk_rejection(const DraftTree& tree, int64_t vocab_size, int32_t* path, Read&& read,
                                   Attempt&& attempt) {
  WalkEnd end{0, 0, 0};
  path[0] = 0;
  for (;;) {
    const uint8_t row_status = read(end.node);
    end.status |= row_status;
    if (row_status != 0 || end.depth == tree.max_depth) return end;
    int32_t accepted = 0;
    uint32_t ordinal = 0;
    for (int32_t child = end.node + 1; child < tree.num_nodes && accepted == 0; ++child) {
      if (tree.parents[child] != end.node) continue;
      const int64_t token = tree.token(child);
      const uint32_t place = ordinal++;
      if (token < 0 || token >= vocab_size) continue;
      const Trial trial = attempt(child, static_cast<int32_t>(token), place, end.depth);
      if (trial == Trial::no_mass) end.status |= kNoDraftMass;
      if (trial == Trial::accepted) accepted = child;
    }
    if (accepted == 0) return end;
    end.node = accepted;
    path[++end.depth] = accepted;
  }
}

// An accepted node of a typical walk; depth -1 is a node that is not accepted.
struct NodeMerit {
  double log_prob;  // sum of ln p from the root
  int32_t depth;
};

// Accept a node whose token passes at its accepted parent's row; end in the deepest, then likeliest, then
// first. `judge(node, token, &log_prob)` says whether a token passes at a row. `merits` holds num_nodes
// entries.
template <typename Judge>
CERBERUS_HD WalkEnd walk_typical(const DraftTree& tree, int64_t vocab_size, NodeMerit* merits, int32_t* path,
                                 Judge&& judge) {
  merits[0] = {0.0, 0};
  int32_t best = 0;
  for (int32_t node = 1; node < tree.num_nodes; ++node) {
    merits[node].depth = -1;
    const int32_t parent = tree.parents[node];
    const int64_t token = tree.token(node);
    if (merits[parent].depth < 0 || merits[parent].depth == tree.max_depth) continue;
    if (token < 0 || token >= vocab_size) continue;
    double log_prob = 0.0;
    if (!judge(parent, static_cast<int32_t>(token), &log_prob)) continue;
    merits[node] = {merits[parent].log_prob + log_prob, merits[parent].depth + 1};
    const bool deeper = merits[node].depth > merits[best].depth;
    const bool likelier =
        merits[node].depth == merits[best].depth && merits[node].log_prob > merits[best].log_prob;
    if (deeper || likelier) best = node;
  }
  int32_t node = best;
  for (int32_t depth = merits[best].depth; depth >= 0; --depth) {
    path[depth] = node;
    node = tree.parents[node];
  }
  return {merits[best].depth, best, 0};
}

// Tokens along the path, the bonus, and -1 behind both outputs' ends.
CERBERUS_HD void write_verdict(const VerifyTreeArgs& args, int64_t b, const DraftTree& tree,
                               const WalkEnd& end, int32_t bonus, float entropy) {
  const int64_t width = args.max_depth + 1;
  int32_t* tokens = args.tokens + b * width;
  int32_t* path = args.path + b * width;
  for (int32_t depth = 0; depth < end.depth; ++depth)
    tokens[depth] = static_cast<int32_t>(tree.token(path[depth + 1]));
  tokens[end.depth] = bonus;
  for (int64_t depth = end.depth + 1; depth < width; ++depth) tokens[depth] = path[depth] = -1;
  uint8_t status = end.status;
  for (int32_t node = 1; node < tree.num_nodes; ++node) {
    const int64_t token = tree.token(node);
    if (token < -1 || token >= args.vocab_size) status |= kTokenOutOfRange;
  }
  args.num_accepted[b] = end.depth;
  args.entropy[b] = entropy;
  args.status[b] = status;
}

// What is left of a row by temperature and filters. A token's weight is exp((entry - greatest) / T); it is
// kept if its score (that quotient) is above cut_score, or equal to it and the id is at most cut_token, and
// the weight is at least min_p.
struct RowSummary {
  double total;    // sum of the kept tokens' weights
  double nats;     // entropy of the kept tokens
  float greatest;  // the row's greatest entry
  int32_t best;    // its token, also that of a row that is no distribution
  float cut_score;
  int32_t cut_token;
  uint8_t status;
  bool read;
};

// What one chunk of a row adds; chunks are combined in order, so results do not depend on who worked on them.
struct ChunkResult {
  double total;
  double weighted;  // sum of weight * score
  float greatest;
  float perturbed;
  int32_t token;
  int32_t flaw;  // a NaN among logits, an entry among draft_probs that is no probability
};

constexpr int64_t kVerifyChunk = 1024;
constexpr int64_t kSelectBuckets = 2048;

// One slot of the workspace, cut into its arrays.
struct VerifySlot {
  ChunkResult* chunks;
  float* peaks;  // greatest value of each tile of 256 tokens
  NodeMerit* merits;
  RowSummary* rows;
  double* mass;   // the rest is null without top_k, top_p and draft_probs
  float* scores;  // [vocab_size], as are the next three
  float* weights;
  int32_t* tokens;
  int32_t* candidates;
};

CERBERUS_HD bool keeps_scores(const VerifyTreeArgs& args) {
  return args.draft_probs || args.top_k.data || args.top_k.value > 0 || args.top_p.data ||
         args.top_p.value < 1.0f;
}

// Lays a slot out at `base` and gives its size in bytes; with a null base only the size means anything.
CERBERUS_HD int64_t lay_out_slot(const VerifyTreeArgs& args, char* base, VerifySlot* slot) {
  int64_t offset = 0;
  const auto take = [&](int64_t bytes) {
    char* at = base + offset;
    offset += (bytes + 63) / 64 * 64;
    return at;
  };
  const int64_t selected = keeps_scores(args) ? args.vocab_size : 0;
  slot->chunks = reinterpret_cast<ChunkResult*>(
      take((args.vocab_size + kVerifyChunk - 1) / kVerifyChunk * static_cast<int64_t>(sizeof(ChunkResult))));
  slot->peaks = reinterpret_cast<float*>(take((args.vocab_size + kVerifyChunk - 1) / kVerifyChunk * 16));
  slot->merits = reinterpret_cast<NodeMerit*>(take(args.nodes * static_cast<int64_t>(sizeof(NodeMerit))));
  slot->rows = reinterpret_cast<RowSummary*>(take(args.nodes * static_cast<int64_t>(sizeof(RowSummary))));
  slot->mass = reinterpret_cast<double*>(take(selected ? kSelectBuckets * 8 : 0));
  slot->scores = reinterpret_cast<float*>(take(selected * 4));
  slot->weights = reinterpret_cast<float*>(take(selected * 4));
  slot->tokens = reinterpret_cast<int32_t*>(take(selected * 4));
  slot->candidates = reinterpret_cast<int32_t*>(take(selected * 4));
  return offset;
}

// Bytes of workspace for args.slots slots; its start must be aligned to 64.
CERBERUS_HD int64_t verify_tree_workspace(const VerifyTreeArgs& args) {
  VerifySlot slot;
  return lay_out_slot(args, nullptr, &slot) * args.slots;
}

namespace cpu {
CERBERUS_EXPORT void verify_tree(const VerifyTreeArgs& args);
}

}  // namespace cerberus
