"""CUDA graphs, with static memory: of layers, one launch each for the forward and the backward pass, or of whole steps.

rules       what cannot be captured, by configuration key
structure   the tensors inside the arguments of a call
capture     one call of a layer as two graphs
pool_slots  the graphs of consecutive layers, for one micro-batch at a time
runs        which micro-batches use graphs of layers, and when these are captured
steps       the gradients of a whole step as one graph
"""
