"""DeepSeek-V2 and V3: latent attention, many small experts beside shared ones, prediction of several tokens."""
