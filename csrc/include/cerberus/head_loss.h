// head_loss: cross-entropy of rows of logits and its gradient, the part between the two matrix products.
#pragma once

#include <cstdint>

#include "cerberus/platform.h"

namespace cerberus {

struct HeadLossArgs {
  float* logits;           // [rows, vocab], contiguous; with needs_gradient becomes the scaled loss' gradient
  const int64_t* targets;  // [rows], each in [0, vocab)
  const float* scale;      // [rows], factor of the row's gradient
  const float* teacher;    // [any, vocab] probabilities, contiguous, or null
  const int64_t* teacher_row;  // [rows], row of teacher; null without teacher
  float* loss;                 // [rows], written, not scaled
  bool* correct;  // [rows], written: the target is the row's first maximum and the row holds no NaN
  int64_t rows;
  int64_t vocab;
  float soft_weight;  // share of the loss on the teacher
  bool needs_gradient;
};

namespace cpu {
CERBERUS_EXPORT void head_loss(const HeadLossArgs& args);
}

}  // namespace cerberus
