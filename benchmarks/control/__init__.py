"""Proofs that controlled speculation never loses: in simulation, on a CPU and on a GPU.

python -m outrider.benchmarks.control --help
"""
