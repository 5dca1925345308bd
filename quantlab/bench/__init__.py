"""Speed: latency, workloads and the metrics computed from time stamps."""
