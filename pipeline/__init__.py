"""Spark: sweeps of many runs and audits of large stores. Nothing runs here yet."""
