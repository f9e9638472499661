"""The experts of a rank, and ways to multiply their matrices."""
