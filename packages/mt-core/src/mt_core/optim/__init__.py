"""Optimizers, schedules, clipping, loss scaling, 16-bit training with fp32 master weights."""
