"""Exemplar memory (memory), MixStyle, selection rules (selection/, one file per rule) and the
network that a rule may train (learner). May import core, config, data, models and matching."""
