"""Prompts, the prober and the classifier of outcomes."""
