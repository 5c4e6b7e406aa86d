"""Ollama's API: input and answers."""
