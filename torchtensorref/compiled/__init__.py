"""What torch.compile has made, called with TensorRefs: on plain tensors, held where it runs.

May import: base, operators, strategy, devices, memory, interception.
"""
