"""verify_tree on JAX arrays: DLPack lends torch the memory and takes the results back, without a copy."""

import jax
import jax.numpy as jnp
import torch

import cerberus_kernels as ck

# The newest token (node 0, id 7) has drafts 3 and 5 below it; 9 follows the 3, and 2 follows the 5.
parents = jnp.array([-1, 0, 0, 1, 2], dtype=jnp.int32)
drafts = jnp.array([[7, 3, 5, 9, 2]], dtype=jnp.int32)
# Row i is the model's distribution after node i; this model is sure of one token each.
logits = 20.0 * jax.nn.one_hot(jnp.array([[5, 9, 2, 4, 11]]), 16)

verdict = ck.verify_tree(*(torch.from_dlpack(array) for array in (logits, drafts, parents)), max_depth=2)
tokens, num_accepted = jnp.from_dlpack(verdict.tokens), jnp.from_dlpack(verdict.num_accepted)
print(f"accepted {num_accepted[0]} drafts, tokens {tokens[0].tolist()}")
