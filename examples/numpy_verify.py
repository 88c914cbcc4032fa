"""verify_tree on NumPy arrays: DLPack lends torch the memory and takes the results back, without a copy."""

import numpy as np
import torch

import cerberus_kernels as ck

# The newest token (node 0, id 7) has drafts 3 and 5 below it; 9 follows the 3, and 2 follows the 5.
parents = np.array([-1, 0, 0, 1, 2], dtype=np.int32)
drafts = np.array([[7, 3, 5, 9, 2]], dtype=np.int32)
# Row i is the model's distribution after node i; this model is sure of one token each.
logits = np.zeros((1, 5, 16), dtype=np.float32)
logits[0, np.arange(5), [5, 9, 2, 4, 11]] = 20.0

verdict = ck.verify_tree(*(torch.from_dlpack(array) for array in (logits, drafts, parents)), max_depth=2)
tokens, num_accepted = np.from_dlpack(verdict.tokens), np.from_dlpack(verdict.num_accepted)
print(f"accepted {num_accepted[0]} drafts, tokens {tokens[0].tolist()}")
