"""Building blocks of decoder models; every one knows its checkpoint tensors and its shard."""
