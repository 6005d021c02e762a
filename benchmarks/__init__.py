"""Benchmarks behind the figures in the README."""
