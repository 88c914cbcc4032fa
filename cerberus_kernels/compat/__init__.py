"""Other engines' verification calls on top of this library, one module per engine, each importable by itself.

``sglang``, ``flashinfer``, ``tensorrt_llm`` and ``vllm`` hold functions with those engines' names, positional arguments
and result conventions; ``links`` holds the conversions between their tree layouts and ``parents``. What differs on
purpose stands in each docstring and in docs/engines.md. ``vllm`` runs on ``verify_tree`` and its backends. The others
are a fixed number of batched torch operations, with no host sync but for refusals on the CPU, so any device will do.
"""
