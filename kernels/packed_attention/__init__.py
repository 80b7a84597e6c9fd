"""Attention of the last tokens of packed rows, dense or quantised: `reference` defines, `fused` is a kernel.

One token a row is the decode read; several are the causal window of speculative rounds and short appends.
"""
