"""Native kernels against the reference operations: every instruction set that this processor can run."""
