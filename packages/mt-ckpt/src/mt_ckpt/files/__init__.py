"""Files that several formats share: checksums, dtypes, safetensors, directories that appear when they are complete."""
