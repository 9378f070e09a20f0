"""The coherence core: which replicas of which bytes are valid. It copies nothing."""
