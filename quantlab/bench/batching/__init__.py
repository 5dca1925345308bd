"""`quantlab batching`: what batching gains, what load costs, and what a latency limit leaves of the capacity."""
