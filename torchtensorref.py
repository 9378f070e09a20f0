"""What somebody finds who writes the name in lower case, as the project and its command have it.

A file, not a folder: on a file system without cases it must not be the package itself.
"""

raise ImportError(
    "There is no module 'torchtensorref': write `import torchTensorRef`.", name="torchtensorref"
)
