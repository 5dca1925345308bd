"""What a prefix cache saves: scenarios and traces, tiers, theory beside measurement, and why a prompt missed."""
