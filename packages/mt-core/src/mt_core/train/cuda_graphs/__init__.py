"""CUDA graphs of layers: their kernels are launched as one, forward and backward, from memory that stays in place.

rules      what cannot be captured, by the key that asks for it
structure  the tensors inside the arguments of a layer
capture    one call of a layer as two graphs
lanes      the calls of consecutive layers, for one micro-batch at a time
runs       which of the micro-batches go through graphs, and when these are captured
"""
