"""The HTTP server of `mt serve`: OpenAI's interface, Megatron's, and a page."""
