"""`surefoot plan`: steps, memory, time, cost and settings of a run before it starts, without a GPU."""
