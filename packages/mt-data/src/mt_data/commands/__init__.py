"""The sub-commands of `mt data`, a module each; `app` puts them together."""
