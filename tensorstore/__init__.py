"""Where the weights are: shard format, store process, loaders."""
