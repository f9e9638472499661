"""OpenAI's HTTP interface: completions, chat, embeddings, models."""
