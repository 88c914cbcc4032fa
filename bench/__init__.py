"""Timings of the operators against their references, plain PyTorch and other libraries; see bench/conftest.py."""
