"""Rewards of generated texts: functions in processes that can be ended, selected by the section [rewards]."""
