// The CPU operators, a line each. Adding one here gives it a run-time choice of instruction-set level.
#pragma once

#include "cerberus/commit_kv.h"
#include "cerberus/decoder_layer.h"
#include "cerberus/gate.h"
#include "cerberus/grow_tree.h"
#include "cerberus/head_loss.h"
#include "cerberus/head_states.h"
#include "cerberus/head_topk.h"
#include "cerberus/packed_linear.h"
#include "cerberus/tree_attention.h"
#include "cerberus/tree_mask.h"
#include "cerberus/verify_tree.h"

// Those that the level amx has builds of its own for.
#define CERBERUS_TILE_OPERATORS(X) \
  X(head_topk, HeadTopkArgs)       \
  X(packed_linear, PackedLinearArgs)

#define CERBERUS_CPU_OPERATORS(X)      \
  X(commit_kv, CommitKvArgs)           \
  X(decoder_layer, DecoderLayerArgs)   \
  X(gate, GateArgs)                    \
  X(grow_tree, GrowTreeArgs)           \
  X(head_loss, HeadLossArgs)           \
  X(head_states, HeadStatesArgs)       \
  X(head_topk, HeadTopkArgs)           \
  X(packed_linear, PackedLinearArgs)   \
  X(tree_attention, TreeAttentionArgs) \
  X(tree_mask, TreeMaskArgs)           \
  X(verify_tree, VerifyTreeArgs)
