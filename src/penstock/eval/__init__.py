"""L13: how good a model is, and what an approximation costs: perplexity, divergence, quantisation side by side."""
