"""What is known of each operator: facts, not actions.

What an operator reads, writes and aliases, what it costs, which operands the host reads, and what
stands for it on another device.

May import: base.
"""
