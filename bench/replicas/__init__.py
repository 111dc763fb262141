"""Several replicas behind one gateway: how much they answer, and whether they find their KV."""
