"""When is a gradient used? Hooks, buckets, the two gradient policies and clipping."""
