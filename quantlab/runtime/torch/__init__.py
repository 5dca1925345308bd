"""Models of transformers in torch: CUDA, CPU and MPS."""
