"""The wide corpora: what others made, and what chance makes, in greater number than the tests have time for."""
