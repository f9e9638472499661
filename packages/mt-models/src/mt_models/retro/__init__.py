"""RETRO: a GPT that reads neighbours of its text, found in a database of chunks."""
