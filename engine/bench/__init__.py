"""Benchmarks: arms alternated in one run, medians with spread, conditions recorded, results never overwritten."""
