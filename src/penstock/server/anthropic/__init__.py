"""Anthropic's messages: input and events."""
