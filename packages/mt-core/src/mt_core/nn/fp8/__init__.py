"""Matrix products in FP8: how numbers are scaled and cast, the products, and the linear layers made of them."""
