"""What everybody needs and that needs nobody: options, errors, units, the log of events.

No torch here, and no effect of an import. Everything that is loaded by `import torchTensorRef`
lives in this folder, or in `inject/hooks.py`.

May import: nothing of ours.
"""
