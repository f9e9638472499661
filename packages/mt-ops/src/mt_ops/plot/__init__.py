"""Pictures of curves: SVG, PNG, PDF and the terminal."""
