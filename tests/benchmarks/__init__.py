"""What `make bench` measures. A bench is a function in one of these modules, made known by `harness.bench`."""
