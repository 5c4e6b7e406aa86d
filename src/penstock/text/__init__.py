"""L2: everything between text and ids: tokenizers, detokenising, stop strings, chat templates, request checks."""
