"""`quantlab speculative`: what a draft gains, beside what theory expects, and why where it does not pay."""
