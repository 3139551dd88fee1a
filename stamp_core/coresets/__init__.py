"""Exemplar memory with MixStyle, selection rules, and a network that a rule may train."""
