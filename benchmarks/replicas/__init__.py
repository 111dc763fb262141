"""Several replicas behind one gateway: throughput and prefix cache hit rate."""
