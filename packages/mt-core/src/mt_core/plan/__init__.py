"""What a layout holds, sends and computes on each rank, worked out without a device.

The very model and its main weights run on the meta device (shapes without memory) with process groups that send
nothing and note what they were asked to send.
"""
