"""L9: one rank. It keeps rows and pages as the scheduler's output says, runs the model and chooses tokens.

Reading order: `runner` (the order of a step), `rows`, `storage`, `input_batch`, `sampler`, `logits`.
"""
