// How a C++ engine verifies a draft tree: fill VerifyTreeArgs with raw pointers, lend a workspace, call.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "cerberus/verify_tree.h"

int main() {
  // One request. Node 0 is the newest token, already emitted; 5 and 3 are drafted below it, 9 below the 3, 2
  // below the 5:
  //      7
  //     / \
  //    3   5
  //    |   |
  //    9   2
  constexpr int64_t kNodes = 5, kVocabulary = 16, kMaxDepth = 2;
  const int32_t tokens[kNodes] = {7, 3, 5, 9, 2};
  const int32_t parents[kNodes] = {-1, 0, 0, 1, 2};

  // Row i holds the model's logits of the token after node i. This model is sure of one token each.
  const int32_t likeliest[kNodes] = {5, 9, 2, 4, 11};
  float logits[kNodes][kVocabulary] = {};
  for (int64_t node = 0; node < kNodes; ++node) logits[node][likeliest[node]] = 20.0f;

  if (cerberus::first_malformed_node(parents, kNodes) >= 0) return 1;

  int32_t emitted[kMaxDepth + 1], path[kMaxDepth + 1], num_accepted;
  float entropy;
  uint8_t status;
  cerberus::VerifyTreeArgs args;
  args.logits = logits;
  args.dtype = cerberus::DType::f32;
  args.logits_row_stride = kVocabulary;
  args.draft_tokens = tokens;
  args.parents = parents;
  args.batch = 1;
  args.nodes = kNodes;
  args.vocab_size = kVocabulary;
  args.max_depth = kMaxDepth;
  args.tokens = emitted;
  args.num_accepted = &num_accepted;
  args.path = path;
  args.entropy = &entropy;
  args.status = &status;

  const char* names[] = {"greedy", "sample"};
  for (const cerberus::VerifyMode mode : {cerberus::VerifyMode::greedy, cerberus::VerifyMode::sample}) {
    args.mode.value = static_cast<int64_t>(mode);
    args.seed.value = 42;
    args.position.value = 1;  // index in the text of the token that follows the root
    const int64_t bytes = (cerberus::verify_tree_workspace(args) + 63) / 64 * 64;
    args.workspace = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(bytes)));
    if (args.workspace == nullptr) return 1;
    cerberus::cpu::verify_tree(args);
    std::free(args.workspace);

    std::printf("%s: accepted %d, path", names[mode == cerberus::VerifyMode::sample], num_accepted);
    for (int32_t i = 0; i <= num_accepted; ++i) std::printf(" %d", path[i]);
    std::printf(", tokens");
    for (int32_t i = 0; i <= num_accepted; ++i) std::printf(" %d", emitted[i]);
    std::printf(", status %d\n", status);
  }
  return 0;
}
