"""Uses gradients inside backward: hooks, buckets, the two gradient policies and clipping."""
