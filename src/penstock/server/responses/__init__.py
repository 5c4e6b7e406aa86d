"""OpenAI's Responses: input, events, runs, what is stored."""
