"""Many processes on torch.distributed, nothing home-made: how they meet, how a model is spread over them."""
