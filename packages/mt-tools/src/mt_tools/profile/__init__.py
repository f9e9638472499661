"""Where the time of training steps goes: recorded by torch's profiler, by layer and kind, against the machine's
roof."""
