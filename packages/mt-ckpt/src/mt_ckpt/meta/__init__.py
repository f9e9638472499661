"""The layout in which Meta publishes Llama and Mistral its own models."""
