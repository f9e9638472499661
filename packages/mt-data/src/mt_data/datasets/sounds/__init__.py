"""Sound in samples: WAV files as samples at 16 kHz, and the tokens that stand for them in a text."""
