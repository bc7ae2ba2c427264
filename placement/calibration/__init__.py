"""Measures the GPUs, or the CPU, of this machine, and fits figures and corrections to them."""
