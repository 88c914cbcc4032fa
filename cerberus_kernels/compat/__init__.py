"""Other engines' verification calls on top of this library, one module per engine, each importable by itself.

``sglang``, ``flashinfer``, ``tensorrt_llm`` and ``vllm`` hold functions with those engines' names, positional arguments
and result conventions; ``links`` holds the conversions between their tree layouts and ``parents``. What differs on
purpose stands in each docstring and in docs/engines.md. They are batched torch operations without a host sync, so they
run on any device and inside a CUDA graph; on the CPU malformed trees are a ValueError as well.
"""
