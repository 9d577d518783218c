"""Benchmarks of apex_amp; run them from the repository's root."""
