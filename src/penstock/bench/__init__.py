"""Measuring: a server over HTTP (ours or any other of OpenAI's shape), or an engine in this process."""

DATASETS = ("random", "prefix_repetition", "sharegpt", "custom", "burstgpt", "timed_trace")
