"""L13: the HTTP server: OpenAI's and Anthropic's wire formats over `engine.frontend`."""
