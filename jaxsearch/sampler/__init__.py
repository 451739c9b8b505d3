"""The segmented sampler: grows trees of token spans, with tools between the segments."""
