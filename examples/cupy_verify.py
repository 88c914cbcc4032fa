"""verify_tree on CuPy arrays: DLPack lends torch the GPU memory and takes the results back, without a copy."""

import cupy as cp
import torch

import cerberus_kernels as ck

# The newest token (node 0, id 7) has drafts 3 and 5 below it; 9 follows the 3, and 2 follows the 5.
parents = cp.array([-1, 0, 0, 1, 2], dtype=cp.int32)
drafts = cp.array([[7, 3, 5, 9, 2]], dtype=cp.int32)
# Row i is the model's distribution after node i; this model is sure of one token each.
logits = cp.zeros((1, 5, 16), dtype=cp.float32)
logits[0, cp.arange(5), cp.array([5, 9, 2, 4, 11])] = 20.0

verdict = ck.verify_tree(*(torch.from_dlpack(array) for array in (logits, drafts, parents)), max_depth=2)
tokens, num_accepted = cp.from_dlpack(verdict.tokens), cp.from_dlpack(verdict.num_accepted)
print(f"accepted {num_accepted[0]} drafts, tokens {tokens[0].tolist()}")
