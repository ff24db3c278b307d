//! `kvserve-gpu`: CUDA kernels and the CUDA backend. Empty until its own issue lands; see its README.
