"""Sound in front of decoders: spectrograms, and features that replace the audio tokens of a text."""
