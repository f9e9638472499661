"""Memory, communication and compute of a layout on each rank, computed without a device.

The real model and its master weights run on the meta device (shapes without memory), with process groups that send
nothing and record the collectives that are called.
"""
