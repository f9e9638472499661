"""CUDA graphs of layers: one graph launch each for the forward and the backward pass, with static memory.

rules       what cannot be captured, by configuration key
structure   the tensors inside the arguments of a layer
capture     one call of a layer as two graphs
pool_slots  the graphs of consecutive layers, for one micro-batch at a time
runs        which micro-batches use graphs, and when these are captured
"""
