"""Proofs that speculation under control never loses: in simulation, on a CPU and on a GPU.

python -m outrider.bench.control --help
"""
