"""The commands `dsec-image` and `dsec`, and the one place where the parts of DSec are put together.

No other component imports this one; each part can therefore be used, tested and restarted without it.
"""
