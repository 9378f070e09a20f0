"""What `torchtensorref run` puts in front of its children's PYTHONPATH: one file that Python loads.

May import: all.
"""
