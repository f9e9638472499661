"""Configurations of TRL, axolotl and LLaMA-Factory."""
