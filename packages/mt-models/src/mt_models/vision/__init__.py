"""Vision transformers: the image towers of CLIP and SigLIP, alone or with a head that tells classes."""
