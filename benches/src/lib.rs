//! Reproducible benchmarks, each with its floor in the same run.
