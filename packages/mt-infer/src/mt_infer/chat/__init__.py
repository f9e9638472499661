"""Conversations as prompts: chat templates, and the tool calls in answers."""
