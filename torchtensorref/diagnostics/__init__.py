"""The command line: run a program, describe the machine, check each device, write the documents.

May import: all.
"""
