"""The lab's algorithms as Triton kernels: pointer loads, one idea a file, written to be read beside their counted twins."""
