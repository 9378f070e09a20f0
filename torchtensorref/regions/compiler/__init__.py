"""What torch.compile gave, called with TensorRefs: it runs as by plain torch, on plain tensors.

May import: base, operators, strategy, devices, memory, interception, regions.
"""
