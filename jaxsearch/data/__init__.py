"""Questions, corpora and the embedded world."""
