"""Benchmarks: conversion, warm reads and cold reads, each beside a control that is measured in the same run.

The machines that run them are shared and noisy, so nothing is measured alone: samples of ours and of the control take
turns, and what counts are medians and the ratios of neighbours. `python -m bench` as root; results: docs/benchmarks.md.
"""
