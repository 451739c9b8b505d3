"""Questions, corpora and public benchmarks."""
